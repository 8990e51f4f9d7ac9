"""Trace attention masks with one code path for every length."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...recipe.aliases import Length, Size, TransformersCache
from .replacement import Function, Replacement, replacement


def mask_replacements() -> Iterator[Replacement]:
    """Yield module, function and replacement for the masks of the installed transformers, if they are imported."""
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None:
        return
    yield masks, "prepare_padding_mask", _prepare_padding_mask
    yield masks, "_ignore_causal_mask_sdpa", _never_ignore_the_mask
    name = "create_recurrent_attention_mask"  # each model has imported it
    for path, module in sys.modules.copy().items():
        if path.startswith("transformers.models.") and name in vars(module):
            yield module, name, _recurrent_mask
    if hasattr(masks, "_vmap_for_bhqkv"):  # 4.56 and 4.57; later versions broadcast by themselves
        yield masks, "_vmap_for_bhqkv", _broadcast_for_bhqkv
        yield masks, "TransformGetItemToIndex", _nothing_to_transform


def _prepare_padding_mask(original: Function) -> Function:
    def prepare_padding_mask(
        attention_mask: torch.Tensor | None, kv_length: Size, kv_offset: Length, *args: object, **kwargs: Any
    ) -> torch.Tensor | None:
        if attention_mask is None:
            return None
        missing = kv_length + kv_offset - attention_mask.shape[-1]
        if isinstance(missing, torch.Tensor) or not statically_known_true(missing <= 0):
            # more than is missing, which no graph has to compute: a mask covers what is before the first key
            padded = torch.nn.functional.pad(attention_mask, (0, missing if type(missing) is int else kv_length))
        else:
            padded = attention_mask
        if kwargs.get("_slice", "_slice" in inspect.signature(original).parameters):  # before 5.0
            return padded[:, torch.arange(kv_length, device=padded.device) + kv_offset]
        return padded

    return prepare_padding_mask


@replacement
def _recurrent_mask(original: Function) -> Function:
    # Not mask[:, -new:]: a slice asks whether it begins at 0, as before the first token, and the answer is fixed.
    def create_recurrent_attention_mask(
        config: object,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: TransformersCache | None = None,
        **kwargs: object,
    ) -> torch.Tensor | None:
        if attention_mask is None or attention_mask.ndim != 2:
            return None
        columns, length = attention_mask.shape[1], inputs_embeds.shape[1]
        torch._check(columns >= length, lambda: f"attention_mask has {columns} columns for {length} tokens")
        return attention_mask.index_select(1, torch.arange(length, device=attention_mask.device) + (columns - length))

    return create_recurrent_attention_mask


def _never_ignore_the_mask(original: Function) -> Function:
    def _ignore_causal_mask_sdpa(*args: object, **kwargs: object) -> bool:
        return False

    return _ignore_causal_mask_sdpa


def _broadcast_for_bhqkv(original: Function) -> Function:
    # What 4.56 and 4.57 vmap over four indices, later versions broadcast. Under vmap an index into the padding mask
    # becomes an operator (`flat_apply`) that torch 2.13 cannot store: "Unsupported getattr attribute
    # function_const_func_spec0".
    def _vmap_for_bhqkv(mask_function: Callable[..., torch.Tensor], bh_indices: bool = True) -> Function:
        def broadcast(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            if not bh_indices:  # batch and head are None
                return mask_function(batch, head, query[:, None], key[None, :]).expand(query.shape[0], key.shape[0])
            mask = mask_function(
                batch[:, None, None, None], head[None, :, None, None], query[None, None, :, None], key[None, None, None]
            )
            return mask.expand(batch.shape[0], head.shape[0], query.shape[0], key.shape[0])

        return broadcast

    return _vmap_for_bhqkv


def _nothing_to_transform(original: Function) -> Function:
    return contextlib.nullcontext
