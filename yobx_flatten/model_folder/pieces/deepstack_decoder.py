"""Export a language model whose first layers also get features of pictures (Qwen3-VL).

.. code-block:: text

    picture --> layer 0 --> layer 1 --> ... --> features       in the place of image tokens
                   |           |
                   v           v                               added to what comes out there, 0 for text
    tokens  --> layer 0 --> layer 1 --> ... --> scores
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from ...huggingface.cache_names import argument_of, cache_of, installed_name
from ...recipe.aliases import TransformersCache, TransformersModel


class DeepstackDecoder(torch.nn.Module):
    """From embeddings and features of layers in between to scores.

    transformers adds to the places of image tokens, whose number depends on values. Here there is a feature for every
    token, zeros for text: the same sum in a graph for every call.
    """

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.layers = len(model.model.visual.deepstack_visual_indexes)
        self.language_model = copy.copy(model.model.language_model)  # with the same weights; the model stays as it is
        self.language_model._deepstack_process = _add
        self.cache_is = argument_of(self.language_model.forward) or installed_name()
        self.head = model.get_output_embeddings()

    @staticmethod
    def fits(model: TransformersModel) -> bool:
        """Return whether a model is of this kind."""
        inside: Any = getattr(model, "model", None)
        return hasattr(getattr(inside, "language_model", None), "_deepstack_process") and bool(
            getattr(getattr(inside, "visual", None), "deepstack_visual_indexes", None)
        )

    def forward(
        self,
        inputs_embeds: Any,
        attention_mask: Any,
        position_ids: Any,
        deepstack_embeds: Any,
        cache: TransformersCache | None = None,
    ) -> dict[str, Any]:
        """Return the scores and the cache; the features have the shape (batch, length, layers, hidden size)."""
        found = self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{self.cache_is: cache},
            visual_pos_masks=attention_mask,  # is handed on to _add, which takes every place
            deepstack_visual_embeds=deepstack_embeds.unbind(2),
            use_cache=True,
        )
        return {"logits": self.head(found.last_hidden_state), "cache": cache_of(found)}


def _add(hidden_states: Any, _: Any, features: Any) -> Any:
    return hidden_states + features
