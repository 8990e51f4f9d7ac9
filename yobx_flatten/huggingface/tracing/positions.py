"""Trace positions that a model computes with Python integers."""

from __future__ import annotations

from typing import Any

import torch

from ...recipe.aliases import Size, TransformersCache
from .replacement import Function, replacement


@replacement
def _next_position(original: Function) -> Function:
    # upstream takes `int(...)` of the sum, for an older exporter: that fixes the length of the example
    def forward(
        again: Function,
        self: Any,
        inputs_shape: torch.Size,
        device: torch.device,
        attention_mask: torch.Tensor | None = None,
        cache: TransformersCache | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> Any:
        seen = 0 if cache is None else cache.get_seq_length()
        if position_ids is not None or (type(seen) is int and seen == 0):
            return again()
        position = torch.ones((1, 1), dtype=torch.long, device=device) * (self.padding_idx + inputs_shape[1] + seen)
        return self._forward(position), position

    return forward


@replacement
def _positions_of_the_call(original: Function) -> Function:
    # upstream cuts the mask's positions after the past: the trace cannot know that as many are left as there are
    # tokens, decides that it is not one, and the program refuses calls of one token
    def forward(
        again: Function,
        self: Any,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: TransformersCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        tokens = inputs_embeds if input_ids is None else input_ids
        if attention_mask is None or tokens is None or position_ids is not None:
            return again()
        length = tokens.shape[1]
        seen = 0 if cache is None else cache.get_seq_length()
        if isinstance(seen, (int, torch.SymInt)):
            # what upstream cannot add to the tokens, these positions would take for a mask of others
            torch._check(
                attention_mask.shape[1] == seen + length, lambda: "attention_mask does not fit the cache and the tokens"
            )
        places = torch.arange(length, device=attention_mask.device) + (attention_mask.shape[1] - length)
        positions = (attention_mask.cumsum(dim=1) * attention_mask - 1).long().index_select(1, places)
        return again(position_ids=positions)

    return forward


@replacement
def _relative_embeddings(original: Function) -> Function:
    # upstream pads its table for more tokens than it has places for, and cuts it for fewer: branches on the length
    def forward(self: Any, relative_embeddings: torch.Tensor, length: Size) -> Any:
        last = relative_embeddings.shape[1] - 1
        places = torch.arange(1 - length, length, device=relative_embeddings.device) + self.window_size
        known = (places >= 0) & (places <= last)
        return torch.where(known[:, None], relative_embeddings[:, places.clamp(0, last)], 0.0)

    return forward


# models, owner, name, version to trace
POSITIONS = (
    (("prophetnet",), "ProphetNetPositionalEmbeddings", "forward", _next_position),
    (("opt",), "OPTDecoder", "forward", _positions_of_the_call),
    (("vits",), "VitsAttention", "_get_relative_embeddings", _relative_embeddings),
)
