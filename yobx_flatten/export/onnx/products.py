"""Put products with matrices of few bits into a graph, in the place of products in float.

.. code-block:: text

    x ──┬── MatMulNBits(bits, scales) ────────────────────────┬──> y     weights are (number - 8) * scale
        └── sum of each block ── MatMul(offsets) ── Add ──────┘          + offset of the block, where there is one

onnxruntime multiplies with a zero point between integers a hundred times slower. The offset of a block is the same
for all of its weights, so it meets the sum of their inputs: one product of a thirty-second of the size.
"""

from __future__ import annotations

from typing import Any

from .split_inputs import InputSplits, SplitInputs
from .stored_matrix import StoredMatrix, plus, reshaped

_FLOATS, _INTEGERS = 1, 4
"""The ``accuracy_level`` of onnxruntime. At the second it also rounds the inputs to 8 bits, and multiplies integers. At
the first, a token takes a third longer in 4 bits, and 15 times as long in 8 bits, which have no kernel there."""


class Products:
    """Replaces products of a graph, in its order; those of the same inputs share the sums of their blocks."""

    def __init__(self, splits: InputSplits) -> None:
        self._sums: dict[tuple[Any, int, bool], Any] = {}
        self._inputs = SplitInputs(splits)

    def replace(self, node: Any, stored: StoredMatrix, *, rounds_inputs: bool) -> None:
        """Replace a ``MatMul`` or ``Gemm`` by a product with a matrix of few bits."""
        import onnx_ir as ir

        sizes = {"K": stored.rows, "N": stored.columns, "bits": stored.bits, "block_size": stored.block_size}
        output, x = node.outputs[0], node.inputs[0]
        rounds_inputs = rounds_inputs or not _takes_floats(x, stored)
        sizes["accuracy_level"] = _FLOATS if stored.bits == 4 and not rounds_inputs else _INTEGERS
        is_split = stored.bits == 8 and not rounds_inputs and not self._inputs.is_whole(x)
        made, rows = self._inputs.split(node.graph, x, len(x.shape), stored) if is_split else ([], x)
        product = ir.node("MatMulNBits", [rows, *stored.parts], sizes, domain="com.microsoft", name=node.name)
        made += [product, *(self._inputs.joined(product.outputs[0]) if is_split and not stored.has_large else [])]
        found = made[-1].outputs[0]
        if stored.offsets is not None:
            turned = ir.node("Transpose", [stored.offsets], {"perm": [1, 0]})
            made += [*self._sum(node.graph, x, stored), turned]
            times = ir.node("MatMul", [self._sums[x, stored.block_size, stored.is_half], turned.outputs[0]])
            made += [times, *plus(found, times.outputs[0], stored)]
        if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
            made.append(ir.node("Add", [made[-1].outputs[0], node.inputs[2]], name=f"{node.name}_bias"))
        if made[-1] is not product:
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
        cut = reshaped(cast[0].outputs[0] if cast else x, len(x.shape) - 1, [stored.blocks, stored.block_size])
        last = ir.node("Constant", [], {"value_ints": [-1]})
        total = ir.node("ReduceSum", [cut[-1].outputs[0], last.outputs[0]], {"keepdims": 0})
        self._sums[key] = total.outputs[0]
        return [*cast, *cut, last, total]


def _takes_floats(x: Any, stored: StoredMatrix) -> bool:
    """Whether inputs in float32 come in whole blocks; those in half precision are rounded."""
    is_float = stored.parts[1].const_value.dtype.name == "FLOAT"
    return is_float and x.shape is not None and len(x.shape) > 1 and stored.rows % stored.block_size == 0
