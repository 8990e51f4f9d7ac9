"""Trace ``torch.nn.TransformerEncoder`` as it computes: zeros where its input is padded on the right.

In ``eval()`` and without gradients it drops padding (nested tensors) and fills up with zeros afterwards, before its
last normalisation. A trace does not take that way, so that what was padded would hold other numbers than the model's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def with_zeros_at_padding(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``TransformerEncoder.forward`` for traces: what the original does outside of one."""

    @functools.wraps(original)
    def forward(
        self: torch.nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        if src_key_padding_mask is None or mask is not None or not _drops_padding(self, src):
            return original(self, src, mask, src_key_padding_mask, is_causal)
        output = src
        for layer in self.layers:
            output = layer(output, src_mask=None, is_causal=False, src_key_padding_mask=src_key_padding_mask)
        padded = src_key_padding_mask.ne(0)
        # it drops padding only where all of it is on the right, in every row
        follows = (padded[:, :-1] & ~padded[:, 1:]).any()
        output = torch.where((padded & ~follows).unsqueeze(-1), 0.0, output)
        return output if self.norm is None else self.norm(output)

    return forward


def _drops_padding(encoder: Any, src: Tensor) -> bool:
    """Whether an encoder drops padding in a call without gradients, outside of a trace."""
    first = encoder.layers[0]
    return bool(
        torch.backends.mha.get_fastpath_enabled()
        and getattr(encoder, "use_nested_tensor", False)
        and getattr(encoder, "mask_check", True)
        and first.self_attn.batch_first
        and not first.training
        and src.dim() == 3
        and not torch.is_autocast_enabled()
    )
