"""Multiply with a matrix in 8 bits at the precision of float inputs, or near it.

.. code-block:: text

    x ──┬── round to 8 bits in blocks ──┬── high ──┬── Concat ── MatMulNBits ── Split ── Add ──> y
        └───────── minus ───────────────┴── low ───┘

onnxruntime rounds the inputs of a matrix in 8 bits to 8 bits, in blocks with a scale each. So ``high`` is what it would
round to, and passes as it is; ``low`` is 254 times smaller than the block, and is rounded at its own size. Both are
rows of one product, which reads each weight once, and takes hardly longer than for one row. The nodes before it do.

.. code-block:: text

    x ──┬── Clip ──┬────────── small ──┬── Concat ── MatMulNBits ── Split ── Add ──> y
        └── minus ─┴── rest of large ──┘

With a limit for what is small (`input_limits`), three nodes do: a block whose largest number is ten times as large as
the others is rounded at the size of these, and what is left of the large one, alone in its block, is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from .stored_matrix import StoredMatrix, reshaped

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["InputLimits", "SplitInputs"]

InputLimits: TypeAlias = Mapping[str, float]
"""By the name of a value of the graph: up to which size its numbers are small; infinite where it stays in one part."""

_LEAST = 1e-30  # added to scales, since a block of zeros has none


class SplitInputs:
    """Splits inputs of products; those of the same inputs in the same blocks share the nodes."""

    def __init__(self, limits: InputLimits) -> None:
        # limits: none for an input that is split as it is rounded
        self._limits = limits
        self._known: dict[tuple[ir.Graph, ir.Value, int], ir.Value] = {}

    def is_whole(self, x: ir.Value) -> bool:
        """Whether inputs are rounded in one part."""
        return self._limits.get(str(x.name)) == math.inf

    def split(self, graph: ir.Graph, x: ir.Value, rank: int, stored: StoredMatrix) -> tuple[list[ir.Node], ir.Value]:
        """Return the nodes that are new, and both parts of the inputs, one after the other on the first axis."""
        key = graph, x, stored.block_size
        if key in self._known:
            return [], self._known[key]
        limit = self._limits.get(str(x.name))
        made = _by_blocks(x, rank, stored) if limit is None else _by_limit(x, limit)
        self._known[key] = made[-1].outputs[0]
        return made, self._known[key]

    @staticmethod
    def joined(product: ir.Value) -> list[ir.Node]:
        """Return the nodes that add the products of both parts."""
        import onnx_ir as ir

        parts = ir.node("Split", [product], {"axis": 0, "num_outputs": 2}, num_outputs=2)
        return [parts, ir.node("Add", list(parts.outputs))]


def _by_limit(x: ir.Value, limit: float) -> list[ir.Node]:
    """Small numbers, and what is left of large ones."""
    import onnx_ir as ir

    ends = [ir.node("Constant", [], {"value_float": end}) for end in (-limit, limit)]
    small = ir.node("Clip", [x, *(end.outputs[0] for end in ends)])
    rest = ir.node("Sub", [x, small.outputs[0]])
    return [*ends, small, rest, ir.node("Concat", [small.outputs[0], rest.outputs[0]], {"axis": 0})]


def _by_blocks(x: ir.Value, rank: int, stored: StoredMatrix) -> list[ir.Node]:
    """What the product rounds inputs to, and the rest."""
    import onnx_ir as ir

    blocks = reshaped(x, rank - 1, [stored.blocks, stored.block_size])
    numbers = {"each": [-1], "most": 127.0, "least": _LEAST}
    given = {
        name: ir.node("Constant", [], {"value_ints" if isinstance(value, list) else "value_float": value})
        for name, value in numbers.items()
    }
    each, most, least = (node.outputs[0] for node in given.values())
    cut = blocks[-1].outputs[0]
    sizes = ir.node("Abs", [cut])
    largest = ir.node("ReduceMax", [sizes.outputs[0], each], {"keepdims": 1})
    positive = ir.node("Add", [largest.outputs[0], least])
    per_unit = ir.node("Div", [most, positive.outputs[0]])
    units = ir.node("Mul", [cut, per_unit.outputs[0]])
    whole = ir.node("Round", [units.outputs[0]])
    high = ir.node("Div", [whole.outputs[0], per_unit.outputs[0]])
    low = ir.node("Sub", [cut, high.outputs[0]])
    both = ir.node("Concat", [high.outputs[0], low.outputs[0]], {"axis": 0})
    flat = reshaped(both.outputs[0], rank - 1, [stored.rows])
    return [*blocks, *given.values(), sizes, largest, positive, per_unit, units, whole, high, low, both, *flat]
