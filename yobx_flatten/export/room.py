"""Leave room for adapters: projections add a product with two matrices that a file takes as optional inputs.

.. code-block:: text

    x ──┬── projection ──────────────────────── Add ──> y     without the inputs both matrices have a rank of 0,
        └── MatMul lora_A ── MatMul lora_B ──────┘            so that zeros are added
            (rows, rank)     (rank, columns)
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..runners.adapters import FIRST, SECOND

_MATRICES = (FIRST, SECOND)
_MARK = "_yobx_room"
_TRACED_RANK = 2  # of the matrices of a trace; torch fixes sizes of 1


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter that a file is checked with."""

    name: str
    matrices: Mapping[str, torch.Tensor]  # by input of the file, which takes those that it has
    active: Callable[[], contextlib.AbstractContextManager[object]]  # the module computes with it inside


@contextlib.contextmanager
def leave_room(model: torch.nn.Module, sizes: Mapping[str, tuple[int, int]]) -> Iterator[None]:
    """Let projections add a product with two matrices inside, which a trace sees; outside they are as they were."""
    # sizes: inputs and outputs of each projection, by its name in the model
    generator = torch.Generator().manual_seed(0)
    changed: list[torch.nn.Module] = []
    try:
        for name, (rows, columns) in sizes.items():
            module = model.get_submodule(name)
            like = next(module.parameters())
            # passes over a graph would join equal constants, so the first ones are drawn
            first = torch.randn(rows, _TRACED_RANK, generator=generator).to(like.dtype)
            module.register_buffer(_MATRICES[0], first)
            module.register_buffer(_MATRICES[1], torch.zeros(_TRACED_RANK, columns, dtype=like.dtype))
            setattr(module, _MARK, name)
            module.forward = _adding(module, module.forward)
            changed.append(module)
        yield
    finally:
        for module in changed:
            del module.forward, module._buffers[_MATRICES[0]], module._buffers[_MATRICES[1]]
            delattr(module, _MARK)


def _adding(module: Any, own: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor, /) -> torch.Tensor:
        return own(x) + torch.matmul(torch.matmul(x, module.lora_A), module.lora_B)

    return forward


def rooms_in(module: torch.nn.Module) -> dict[str, str]:
    """Return the inputs that a file of a module has for adapters, by the name of the matrix in the module."""
    return {
        f"{place}.{matrix}": f"{getattr(one, _MARK)}.{matrix}"
        for place, one in module.named_modules(remove_duplicate=False)
        if hasattr(one, _MARK)
        for matrix in _MATRICES
    }
