"""Put a matrix of few bits into a graph, in the place of one in float.

.. code-block:: text

    x ──┬── MatMulNBits(bits, scales) ────────────────────────┬──> y     weights are (number - 8) * scale
        └── sum of each block ── MatMul(offsets) ── Add ──────┘          + offset of the block, where there is one

onnxruntime multiplies with a zero point between integers a hundred times slower. The offset of a block is the same
for all of its weights, so it meets the sum of their inputs: one product of a thirty-second of the size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

__all__ = ["Products", "StoredMatrix", "new_value", "take_rows"]

_INTEGERS = 4
"""The ``accuracy_level`` at which onnxruntime also rounds activations to 8 bits, in blocks, and multiplies integers.
Without it, 8 bits have no kernel of their own on the CPU and are 15 times slower."""


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


class Products:
    """Replaces products of a graph, in its order; those of the same inputs share the sums of their blocks."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Any, int, bool], Any] = {}

    def replace(self, node: Any, stored: StoredMatrix) -> None:
        """Replace a ``MatMul`` or ``Gemm`` by a product with a matrix of few bits."""
        import onnx_ir as ir

        sizes = {"K": stored.rows, "N": stored.columns, "bits": stored.bits, "block_size": stored.block_size}
        sizes["accuracy_level"] = _INTEGERS
        output, x = node.outputs[0], node.inputs[0]
        product = ir.node("MatMulNBits", [x, *stored.parts], sizes, domain="com.microsoft", name=node.name)
        made = [product]
        if stored.offsets is not None:
            turned = ir.node("Transpose", [stored.offsets], {"perm": [1, 0]})
            made += [*self._sum(node.graph, x, stored), turned]
            times = ir.node("MatMul", [self._sums[x, stored.block_size, stored.is_half], turned.outputs[0]])
            made += [times, *_plus(product.outputs[0], times.outputs[0], stored)]
        if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
            made.append(ir.node("Add", [made[-1].outputs[0], node.inputs[2]], name=f"{node.name}_bias"))
        if len(made) > 1:
            product.outputs[0].type = output.type
            product.outputs[0].name = f"{output.name}_product"
        before = node.inputs[1].producer()
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], made, [output], [made[-1].outputs[0]])
        if before is not None and not before.outputs[0].uses():
            before.graph.remove(before, safe=True)

    def _sum(self, graph: Any, x: Any, stored: StoredMatrix) -> list[Any]:
        """The nodes that sum the blocks of inputs, in float32; none where there are some already."""
        import onnx_ir as ir

        key = x, stored.block_size, stored.is_half
        known = self._sums.get(key)
        if known is not None and known.producer().graph is graph:
            return []
        cast = [ir.node("Cast", [x], {"to": ir.DataType.FLOAT.value})] if stored.is_half else []
        cut = _reshaped(cast[0].outputs[0] if cast else x, len(x.shape) - 1, [stored.blocks, stored.block_size])
        last = ir.node("Constant", [], {"value_ints": [-1]})
        total = ir.node("ReduceSum", [cut[-1].outputs[0], last.outputs[0]], {"keepdims": 0})
        self._sums[key] = total.outputs[0]
        return [*cast, *cut, last, total]


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
        cut = _reshaped(gather.outputs[0], rank, [stored.blocks, stored.block_size])
        found = ir.node("Gather", [stored.offsets, rows], {"axis": 0})
        last = ir.node("Constant", [], {"value_ints": [-1]})
        each = ir.node("Unsqueeze", [found.outputs[0], last.outputs[0]])
        made += [*cut, found, last, each, *_plus(cut[-1].outputs[0], each.outputs[0], stored)]
        made += _reshaped(made[-1].outputs[0], rank, [stored.rows])
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], made, [output], [made[-1].outputs[0]])


def _reshaped(value: Any, rank: int, sizes: Sequence[int]) -> list[Any]:
    """Nodes that keep the first axes of a value and give the rest other sizes."""
    import onnx_ir as ir

    shape = ir.node("Constant", [], {"value_ints": [*[0] * rank, *sizes]})
    return [shape, ir.node("Reshape", [value, shape.outputs[0]])]


def _plus(value: Any, offset: Any, stored: StoredMatrix) -> list[Any]:
    """Nodes that add offsets, computed in float32."""
    import onnx_ir as ir

    cast = [ir.node("Cast", [offset], {"to": ir.DataType.FLOAT16.value})] if stored.is_half else []
    return [*cast, ir.node("Add", [value, cast[0].outputs[0] if cast else offset])]
