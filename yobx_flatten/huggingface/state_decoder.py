"""Wrap a decoder that has only states, so that it has the inputs of decoders with attention.

.. code-block:: text

    the model     input_ids, mask of the new tokens, cache
    this module   input_ids, mask of all tokens, cache
"""

from __future__ import annotations

import inspect
import typing
from typing import Any

import torch

from ..recipe.aliases import CacheLayer, TransformersCache, TransformersConfig, TransformersModel
from .cache_names import CACHE, argument_of, cache_of, forward_of


def new_dynamic_cache(config: TransformersConfig) -> TransformersCache:
    """Return an empty ``DynamicCache`` with the layers that a configuration asks for."""
    from transformers.cache_utils import DynamicCache

    takes_config = "config" in inspect.signature(DynamicCache.__init__).parameters  # not before 4.57
    return DynamicCache(config=config) if takes_config else DynamicCache()


def has_states_alone(model: TransformersModel) -> bool:
    """Return whether the cache of a model holds states, and no keys and values of tokens.

    The kinds of its layers state it. A model with its own cache class (xLSTM, and Mamba before transformers 5)
    is one if that class counts no tokens.
    """
    name = argument_of(forward_of(model))
    if name is None:
        return False
    annotation = inspect.signature(forward_of(model)).parameters[name].annotation
    classes = [cls for cls in (annotation, *typing.get_args(annotation)) if isinstance(cls, type)]
    caches = [cls for cls in classes if cls.__name__.endswith("Cache")]
    if caches and not any(hasattr(cls, "get_seq_length") for cls in caches):
        return True
    layers = new_dynamic_cache(model.config.get_text_config(decoder=True)).layers
    return bool(layers) and all(_is_state(layer) for layer in layers)


def _is_state(layer: CacheLayer) -> bool:
    return hasattr(layer, "recurrent_states") and not hasattr(layer, "keys")


class StateDecoder(torch.nn.Module):
    """A model such as Mamba, which gets the mask of all tokens."""

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.cache_is = argument_of(model.forward) or CACHE

    @staticmethod
    def fits(model: torch.nn.Module) -> bool:
        """Return whether a model continues from states alone, and takes a mask also after a state."""
        from transformers.cache_utils import Cache

        takes = inspect.signature(model.forward).parameters
        # before 5.23 a state leaves the mask out
        masks = {"attention_mask", "logits_to_keep"} <= set(takes) and hasattr(Cache, "get_recurrent_state")
        return masks and has_states_alone(model)

    def get_input_embeddings(self) -> torch.nn.Module:
        """Return the embeddings of the model."""
        return self.model.get_input_embeddings()  # type: ignore[no-any-return] # transformers counts as untyped

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        cache: TransformersCache | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
    ) -> dict[str, Any]:
        """Return the scores and the cache."""
        # Not mask[:, -new:]: a slice asks whether it begins at 0, and the answer is fixed in the program.
        new = input_ids.shape[1]
        last = torch.arange(new, device=input_ids.device) + (attention_mask.shape[1] - new)
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask.index_select(1, last),
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **{self.cache_is: cache},
        )
        return {"logits": found.logits, "cache": cache_of(found)}
