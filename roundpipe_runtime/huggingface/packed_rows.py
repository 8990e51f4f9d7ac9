"""Packed rows: several texts in one row, whose positions begin again. Some models let a text see the one before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from yobx_flatten.errors.failures import result_or

from ..pipeline.live import with_own_forwards
from .cutting.check import evaluating

# What a text may differ by next to another one, relative to its numbers.
_ROUNDING, _ROUNDING_16 = 1e-4, 2e-2


def is_packed(kwargs: Mapping[str, Any]) -> bool:
    """Report whether positions of a call begin again within a row, which is not masked as padding is.

    >>> is_packed({"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}), is_packed({"position_ids": torch.arange(5)[None]})
    (True, False)
    """
    positions = kwargs.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.dim() < 2 or positions.shape[-1] < 3:
        return False
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and not bool(mask.all()):
        return False
    begins = (positions[..., 1:-1] == 0) & (positions[..., :-2] != 0) & (positions[..., 2:] == 1)
    return bool(begins.any())


def keeps_texts_apart(model: nn.Module) -> bool | None:
    """Return whether a model computes the same for a text alone and behind another one in its row.

    It is called with both, on the host. Models with recurrent states carry them on, whatever the positions are.
    ``None`` if the model does not run on tokens alone.
    """
    one, other = torch.tensor([[3, 4, 5, 6, 7]]), torch.tensor([[8, 9, 3, 5]])
    positions = torch.cat([torch.arange(5), torch.arange(4)])[None]

    def is_apart() -> bool:
        try:
            alone = model(input_ids=other, position_ids=positions[:, 5:])[0]
            packed = model(input_ids=torch.cat([one, other], 1), position_ids=positions, use_cache=False)[0][:, 5:]
        except TypeError:  # it takes no positions, without which nothing states where a text begins
            return False
        rounding = _ROUNDING_16 if alone.dtype.itemsize < 4 else _ROUNDING
        return bool((alone - packed).float().norm() <= rounding * alone.float().norm())

    with with_own_forwards(model), evaluating(model), torch.no_grad():
        return result_or(is_apart, lambda error: None)  # a model raises what it likes for what it does not take
