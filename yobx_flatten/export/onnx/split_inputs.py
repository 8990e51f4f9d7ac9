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

With a limit for what is small (`input_splits`), three nodes do: a block whose largest number is ten times as large as
the others is rounded at the size of these, and what is left of the large one, alone in its block, is exact.

.. code-block:: text

    x ──┬── large channels / step ── Round ──┬── Gather ── Pad ──┐
        └────────────── minus ───────────────┴───── small ───────┴── Concat ── MatMulNBits ──> y
                                                                     W, and its rows of these channels, times the step

Two rows take twice the time for many tokens. Where the same channels are large whatever the token, as after a norm, one
block of columns more is enough. It holds these channels in whole steps, and the number 127, whose weights are 0. A step
is a 127th of the largest number on a text, so onnxruntime's scale of the block is 1, and whole numbers stay as they
are. A token with a larger number has a larger scale, and only its own block is rounded more coarsely.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy
import torch

from .stored_matrix import StoredMatrix, new_value, reshaped

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclasses.dataclass(frozen=True)
class InputSplit:
    """How an input is split."""

    limit: float  # up to which size its numbers are small; infinite where it stays in one part
    # channels that are large whatever the token, one less than a block has; none where two rows are nearer
    channels: list[int] = dataclasses.field(default_factory=list)
    step: float = 0.0  # of these channels

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        """Return inputs of shape (tokens, size) with whole steps of large channels, and a zero, before the rest."""
        large = x[:, self.channels].div(self.step).round() * self.step
        found = torch.cat([large, torch.zeros(len(x), 1), x], 1)
        found[:, len(self.channels) + 1 :][:, self.channels] -= large
        return found

    def rows(self, weights: torch.Tensor) -> torch.Tensor:
        """Return a matrix of shape (size, outputs) with the rows that these meet."""
        return torch.cat([weights[self.channels], torch.zeros_like(weights[:1]), weights])


InputSplits: TypeAlias = Mapping[str, InputSplit]
"""How inputs are split, by the name of a value of the graph."""

_LEAST = 1e-30  # added to scales, since a block of zeros has none

_STEPS = 127  # of the largest number of a block


class SplitInputs:
    """Splits inputs of products; those of the same inputs in the same blocks share the nodes."""

    def __init__(self, splits: InputSplits) -> None:
        # splits: none for an input that is split as it is rounded
        self._splits = splits
        self._known: dict[tuple[ir.Graph, ir.Value, int, bool], ir.Value] = {}

    def is_whole(self, x: ir.Value) -> bool:
        """Whether inputs are rounded in one part."""
        split = self._splits.get(str(x.name))
        return split is not None and split.limit == math.inf

    def split(self, graph: ir.Graph, x: ir.Value, rank: int, stored: StoredMatrix) -> tuple[list[ir.Node], ir.Value]:
        """Return the nodes that are new, and both parts of the inputs.

        Parts follow each other on the last axis where the matrix has rows for that, else on the first one.
        """
        key = graph, x, stored.block_size, stored.has_large
        if key in self._known:
            return [], self._known[key]
        split = self._splits.get(str(x.name))
        if split is None:
            made = _by_blocks(x, rank, stored)
        else:
            made = _by_channels(graph, x, split, stored) if stored.has_large else _by_limit(x, split.limit)
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


def _by_channels(graph: ir.Graph, x: ir.Value, split: InputSplit, stored: StoredMatrix) -> list[ir.Node]:
    """Take whole steps out of the large channels, and put them into a separate block of columns."""
    import onnx_ir as ir

    channels = numpy.array(split.channels)
    steps = numpy.zeros(stored.rows - stored.block_size, numpy.float32)
    steps[channels] = 1 / split.step
    large = new_value(graph, f"{x.name}_large", ir.tensor(channels))
    per_unit = new_value(graph, f"{x.name}_per_step", ir.tensor(steps))
    given = {"step": split.step, "most": float(_STEPS), "room": [0, 1], "last": [-1]}
    constants = [
        ir.node("Constant", [], {"value_ints" if isinstance(value, list) else "value_float": value})
        for value in given.values()
    ]
    step, most, room, last = (node.outputs[0] for node in constants)
    units = ir.node("Mul", [x, per_unit])
    whole = ir.node("Round", [units.outputs[0]])
    taken = ir.node("Mul", [whole.outputs[0], step])
    small = ir.node("Sub", [x, taken.outputs[0]])
    columns = ir.node("Gather", [whole.outputs[0], large], {"axis": -1})
    block = ir.node("Pad", [columns.outputs[0], room, most, last])
    both = ir.node("Concat", [small.outputs[0], block.outputs[0]], {"axis": -1})
    return [*constants, units, whole, taken, small, columns, block, both]


def _by_blocks(x: ir.Value, rank: int, stored: StoredMatrix) -> list[ir.Node]:
    """Inputs as the product rounds them, and the rest."""
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
