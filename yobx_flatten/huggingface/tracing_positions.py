"""Positions that a model computes in Python integers, computed from sizes of a trace."""

from __future__ import annotations

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


# models, owner, name, version to trace
POSITIONS = ((("prophetnet",), "ProphetNetPositionalEmbeddings", "forward", _next_position),)
