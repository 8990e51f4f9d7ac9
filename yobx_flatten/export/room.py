"""Leave room for adapters: projections add a product with two matrices that a file takes as optional inputs.

.. code-block:: text

    x ──┬── projection ──────────────────────── Add ──> y     without the inputs both matrices have a rank of 0,
        └── MatMul lora_A ── MatMul lora_B ──────┘            so that zeros are added
            (rows, rank)     (rank, columns)
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import FlattenError
from ..runners.adapters import FIRST, SECOND

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["Adapter", "leave_room", "open_rooms", "quiet_about", "rooms_in"]

_MATRICES = (FIRST, SECOND)
_MARK = "_yobx_room"
_TRACED_RANK = 2  # of the matrices of a trace; torch fixes sizes of 1


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter that a file is proven with."""

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
            module.forward = _adding(module, module.forward)  # type: ignore[method-assign] # as hooks cannot: traced
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


def open_rooms(model: ir.Model, rooms: Mapping[str, str]) -> None:
    """Make matrices of a converted graph optional inputs, whose rank is 0 where they are not given."""
    # rooms: name of the input by name of the matrix, see `rooms_in`
    import numpy
    import onnx_ir as ir

    graph = model.graph
    for name, given in rooms.items():
        value = graph.initializers.get(name)
        if value is None or value.const_value is None:  # of another file of the model
            continue
        rank = f"{given.rpartition('.')[0]}.rank"
        rows, columns = value.const_value.shape
        is_first = given.endswith(_MATRICES[0])
        empty = numpy.zeros((rows, 0) if is_first else (0, columns), value.const_value.dtype.numpy())
        graph.initializers.pop(name)
        value.name, value.const_value = given, ir.tensor(empty, name=given)
        value.shape = ir.Shape([rows, rank] if is_first else [rank, columns])
        graph.register_initializer(value)
        graph.inputs.append(value)
        if is_first:
            _state_rank(value, rank)


def _state_rank(first: ir.Value, rank: str) -> None:
    """State the rank in the shapes of products with a first matrix: onnxruntime shares memory by stated shapes."""
    import onnx_ir as ir

    for node, place in first.uses():
        product = node.outputs[0]
        if node.op_type != "MatMul" or place != 1 or product.shape is None:
            raise FlattenError(f"{first.name} is not multiplied with what a layer reads, but goes into {node.op_type}.")
        product.shape = ir.Shape([*product.shape[:-1], rank])


@contextlib.contextmanager
def quiet_about(rooms: Collection[str]) -> Iterator[None]:
    """Keep a message of onnx_ir off the terminal, which comes for each input that has a value of its own."""
    log = logging.getLogger("onnx_ir.passes.common.initializer_deduplication")

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Skipped deduplication of initializer")

    if rooms:
        log.addFilter(is_news)
    try:
        yield
    finally:
        log.removeFilter(is_news)
