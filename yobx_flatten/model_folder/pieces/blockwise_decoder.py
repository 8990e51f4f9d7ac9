"""Export the language model of a vision-language model whose tokens of one image attend to each other.

.. code-block:: text

    Gemma 3                                    PaliGemma
    a  [image]  b    token_type_ids 0 1 1 0    [prompt]  c    token_type_ids 0 0 0 1
    x                                          x  x  x
    x   x  x         tokens of one image       x  x  x        the whole prompt
    x   x  x         see each other            x  x  x        what is generated sees
    x   x  x  x                                x  x  x  x     what is before it
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from ...huggingface.cache_names import argument_of, cache_of, installed_name
from ...recipe.aliases import TransformersCache, TransformersModel


class BlockwiseDecoder(torch.nn.Module):
    """From embeddings to scores, with masks made of sizes and types of tokens only: one graph for every call.

    transformers reads the types in the first call and leaves them out in all others. Here each call has those of all
    tokens, as it has the mask: a new token is of no block, so that it sees what is before it.
    """

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.language_model = model.model.language_model
        self.cache_is = argument_of(self.language_model.forward) or installed_name()
        self.head = model.get_output_embeddings()
        self.is_whole_prompt = model.config.model_type == "paligemma"

    @staticmethod
    def fits(model: TransformersModel) -> bool:
        """Return whether a model is of this kind."""
        return getattr(getattr(model, "config", None), "model_type", "") in ("gemma3", "paligemma")

    def types(self, batch: int, past: int, new: int) -> torch.Tensor:
        """Make types of tokens with blocks in the cache and among the new ones: int64 of shape (batch, past + new)."""
        found = torch.zeros(batch, past + new, dtype=torch.int64)
        if self.is_whole_prompt:
            found[:, past + new // 2 :] = 1
        else:
            found[:, 1 : past - 1] = 1
            found[:, past + 1 :] = 1
        return found

    def forward(
        self,
        inputs_embeds: Any,
        attention_mask: Any,
        position_ids: Any,
        token_type_ids: Any,
        cache: TransformersCache | None = None,
    ) -> dict[str, Any]:
        """Return the scores and the cache."""
        config = self.language_model.config
        kinds = getattr(config, "layer_types", None)
        new, total = inputs_embeds.shape[1], attention_mask.shape[1]
        blocks = torch.where(attention_mask.bool(), self._blocks(token_type_ids), -1)

        def mask(kept: Any, window: int | None) -> Any:
            query = torch.arange(new, device=inputs_embeds.device) + (total - new)
            key = torch.arange(kept + new, device=inputs_embeds.device) + (total - new - kept)
            shown, block = key <= query[:, None], blocks.index_select(1, query)[:, :, None]
            together = (block == blocks.index_select(1, key)[:, None]) & (block >= 0)
            near = key > query[:, None] - window if window is not None else torch.ones_like(shown)
            seen = (shown & near) | together if self.is_whole_prompt else (shown | together) & near
            seen = seen & attention_mask.index_select(1, key)[:, None].bool()
            least = torch.finfo(inputs_embeds.dtype).min
            return torch.zeros_like(seen, dtype=inputs_embeds.dtype).masked_fill(~seen, least)[:, None]

        masks: Any = mask(total - new, None)
        if kinds is not None and "sliding_attention" in kinds:
            layer = None if cache is None else cache.layers[kinds.index("sliding_attention")]
            kept = 0 if layer is None or layer.keys is None else layer.keys.shape[-2]
            masks = {"full_attention": masks, "sliding_attention": mask(kept, config.sliding_window)}
        found = self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=masks,
            position_ids=position_ids + 1 if self.is_whole_prompt else position_ids,
            **{self.cache_is: cache},
            use_cache=True,
        )
        logits = self.head(found.last_hidden_state)
        cap = getattr(config, "final_logit_softcapping", None) if self.is_whole_prompt else None
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        return {"logits": logits, "cache": cache_of(found)}

    def _blocks(self, types: Any) -> Any:
        """The number of the block of each token, -1 for none."""
        if self.is_whole_prompt:
            return -types.clamp(max=1)
        inside = types == 1
        begins = inside & ~torch.nn.functional.pad(inside, (1, 0))[:, :-1]
        return torch.where(inside, begins.long().cumsum(1) - 1, -1)


# Export a language model whose first layers also get features of pictures (Qwen3-VL).


class DeepstackDecoder(torch.nn.Module):
    """Computes scores from embeddings and features of intermediate layers.

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
