"""The same inputs in other places of memory: a compiled file reads by the strides that it was made for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

__all__ = ["strided"]


def strided(inputs: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the same values twice: as slices of larger tensors, and with their axes in another order of memory.

    Args:
        inputs: tensors by name.
    """
    yield {name: torch.stack([value, value + value], dim=-1)[..., 0] for name, value in inputs.items()}
    yield {name: _reversed(_reversed(value).contiguous()) for name, value in inputs.items()}


def _reversed(value: torch.Tensor) -> torch.Tensor:
    return value.permute(tuple(reversed(range(value.dim()))))
