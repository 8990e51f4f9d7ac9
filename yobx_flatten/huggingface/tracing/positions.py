"""Positions that a model computes in Python integers, or with sizes that a trace cannot compare."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

__all__ = ["POSITIONS"]


def _next_position(original: Any) -> Any:
    # upstream takes `int(...)` of the sum, for an older exporter: that fixes the length of the example
    def forward(
        self: Any,
        inputs_shape: Any,
        device: Any,
        attention_mask: Any = None,
        past_key_values: Any = None,
        position_ids: Any = None,
    ) -> Any:
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        if position_ids is not None or (type(seen) is int and seen == 0):
            return original(self, inputs_shape, device, attention_mask, past_key_values, position_ids)
        position = torch.ones((1, 1), dtype=torch.long, device=device) * (self.padding_idx + inputs_shape[1] + seen)
        return self._forward(position), position

    return forward


def _positions_of_the_call(original: Any) -> Any:
    # upstream cuts the mask's positions after the past: the trace cannot know that as many are left as there are
    # tokens, decides that it is not one, and the program refuses calls of one token
    signature = inspect.signature(original)
    if "position_ids" not in signature.parameters:
        return original

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        mask = given.get("attention_mask")
        tokens = next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)
        if mask is None or tokens is None or given.get("position_ids") is not None:
            return original(*args, **kwargs)
        length = tokens.shape[1]
        past = given.get("past_key_values")
        seen = 0 if past is None else past.get_seq_length()
        if isinstance(seen, (int, torch.SymInt)):
            # what upstream cannot add to the tokens, these positions would take for a mask of others
            torch._check(mask.shape[1] == seen + length, lambda: "attention_mask does not fit the cache and the tokens")
        places = torch.arange(length, device=mask.device) + (mask.shape[1] - length)
        positions = (mask.cumsum(dim=1) * mask - 1).long().index_select(1, places)
        return original(*args, **{**kwargs, "position_ids": positions})

    return forward


# models, owner, name, version to trace
POSITIONS = (
    (("prophetnet",), "ProphetNetPositionalEmbeddings", "forward", _next_position),
    (("opt",), "OPTDecoder", "forward", _positions_of_the_call),
)
