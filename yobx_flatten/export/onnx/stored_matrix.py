"""A matrix of few bits in a graph, and the rows that an embedding reads of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    """A matrix of few bits in a graph."""

    bits: int
    block_size: int  # number of weights that share a scale
    rows: int  # number of its inputs
    columns: int  # number of its outputs
    parts: Sequence[Any]  # values of the graph: bits, scales, and zero points where these are not all `2**bits / 2`
    nbytes: int  # their size in the file
    # what is added to the weights of each block, float32 of shape (columns, blocks); `None` for nothing
    offsets: Any = None
    is_half: bool = False  # whether it multiplies numbers of float16
    has_large: bool = False  # whether its last block are further rows for large channels, see `.split_inputs`

    @property
    def blocks(self) -> int:
        """Number of blocks of a column."""
        return -(-self.rows // self.block_size)


def new_value(graph: Any, name: str, tensor: Any) -> Any:
    """Add an initializer to a graph."""
    import onnx_ir as ir

    value = ir.Value(name=name, const_value=tensor)
    value.shape, value.type = tensor.shape, ir.TensorType(tensor.dtype)
    graph.register_initializer(value)
    return value


def take_rows(node: Any, stored: StoredMatrix) -> None:
    """Replace a ``Gather`` of rows, which are the columns of a matrix of few bits."""
    import onnx_ir as ir

    sizes = {"bits": stored.bits, "block_size": stored.block_size, "gather_axis": 0, "quantize_axis": 1}
    shape = ir.node("Constant", [], {"value_ints": [stored.columns, -1]})
    flat = [ir.node("Reshape", [part, shape.outputs[0]]) for part in stored.parts]
    parts = [one.outputs[0] for one in flat]
    rows, output = node.inputs[1], node.outputs[0]
    gather = ir.node(
        "GatherBlockQuantized", [parts[0], rows, *parts[1:]], sizes, domain="com.microsoft", name=node.name
    )
    made = [shape, *flat, gather]
    if stored.offsets is not None:
        rank = len(rows.shape)
        cut = reshaped(gather.outputs[0], rank, [stored.blocks, stored.block_size])
        found = ir.node("Gather", [stored.offsets, rows], {"axis": 0})
        last = ir.node("Constant", [], {"value_ints": [-1]})
        each = ir.node("Unsqueeze", [found.outputs[0], last.outputs[0]])
        made += [*cut, found, last, each, *plus(cut[-1].outputs[0], each.outputs[0], stored)]
        made += reshaped(made[-1].outputs[0], rank, [stored.rows])
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], made, [output], [made[-1].outputs[0]])


def reshaped(value: Any, rank: int, sizes: Sequence[int]) -> list[Any]:
    """Nodes that keep the first axes of a value and give the rest other sizes."""
    import onnx_ir as ir

    shape = ir.node("Constant", [], {"value_ints": [*[0] * rank, *sizes]})
    return [shape, ir.node("Reshape", [value, shape.outputs[0]])]


def plus(value: Any, offset: Any, stored: StoredMatrix) -> list[Any]:
    """Nodes that add offsets, computed in float32."""
    import onnx_ir as ir

    cast = [ir.node("Cast", [offset], {"to": ir.DataType.FLOAT16.value})] if stored.is_half else []
    return [*cast, ir.node("Add", [value, cast[0].outputs[0] if cast else offset])]
