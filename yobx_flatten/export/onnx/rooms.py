"""Make matrices of adapters optional inputs of a graph, with a rank of 0 where they are not given."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from ...errors import FlattenError
from ...runners.adapters import FIRST
from .rewrite.repair import sizes_of

if TYPE_CHECKING:
    import onnx_ir as ir


def open_rooms(model: ir.Model, rooms: Mapping[str, str]) -> None:
    """Make matrices of a converted graph optional inputs, whose rank is 0 where they are not given."""
    # rooms: name of the input by name of the matrix, see `room.rooms_in`
    import numpy
    import onnx_ir as ir

    graph = model.graph
    for name, given in rooms.items():
        value = graph.initializers.get(name)
        if value is None or value.const_value is None:  # of another file of the model
            continue
        rank = f"{given.rpartition('.')[0]}.rank"
        rows, columns = sizes_of(value.const_value)
        is_first = given.endswith(FIRST)
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
