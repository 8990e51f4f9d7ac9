"""A decoder that goes on from states alone, with the inputs of the decoders that have attention.

.. code-block:: text

    the model     input_ids, mask of the new tokens, cache_params
    this module   input_ids, mask of all tokens, past_key_values
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

__all__ = ["StateDecoder"]


class StateDecoder(torch.nn.Module):
    """A model such as Mamba, which is given the mask of all tokens, and its cache as ``past_key_values``.

    Args:
        model: a model of transformers of which :meth:`fits` is true.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    @staticmethod
    def fits(model: torch.nn.Module) -> bool:
        """Return whether a model takes its cache as ``cache_params``, and a mask also after a state."""
        from transformers.cache_utils import Cache

        takes = inspect.signature(model.forward).parameters
        wanted = {"cache_params", "attention_mask", "logits_to_keep"}
        # before 5.23 a state leaves the mask out
        return "past_key_values" not in takes and wanted <= set(takes) and hasattr(Cache, "get_recurrent_state")

    def get_input_embeddings(self) -> Any:
        """Return the embeddings of the model."""
        return self.model.get_input_embeddings()

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any,
        past_key_values: Any = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
    ) -> Any:
        """Return the scores and the cache."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        # Not mask[:, -new:]: a slice asks whether it begins at 0, and the answer is fixed in the program.
        new = input_ids.shape[1]
        last = torch.arange(new, device=input_ids.device) + (attention_mask.shape[1] - new)
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask.index_select(1, last),
            cache_params=past_key_values,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
        )
        return CausalLMOutputWithPast(logits=found.logits, past_key_values=found.cache_params)
