"""Add quantized matrices to an ONNX graph, read embedding rows of them, and split activations by magnitude."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy
import torch

from .weights import WeightGrid, find_grid, unmap

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    bits: int
    block_size: int  # number of weights that share a scale
    rows: int  # number of inputs
    columns: int  # number of outputs
    parts: Sequence[Any]  # graph values: integers, scales, and zero points unless all of them are `2**bits / 2`
    nbytes: int  # size in the file
    offsets: Any = None  # a number to add to the weights of each block, float32 of shape (columns, blocks)
    is_half: bool = False  # whether its inputs are float16

    @property
    def blocks(self) -> int:
        """Number of quantization blocks in a column of the matrix."""
        return -(-self.rows // self.block_size)


def new_value(graph: Any, name: str, tensor: Any) -> Any:
    """Add an initializer to an ONNX graph, and return its value."""
    import onnx_ir as ir

    value = ir.Value(name=name, const_value=tensor)
    value.shape, value.type = tensor.shape, ir.TensorType(tensor.dtype)
    graph.register_initializer(value)
    return value


def replace_product(node: Any, product: Any, made: list[Any]) -> None:
    """Replace a ``MatMul`` or ``Gemm`` by the nodes of a quantized product, and add the bias of the ``Gemm``."""
    import onnx_ir as ir

    output, before = node.outputs[0], node.inputs[1].producer()
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
        made.append(ir.node("Add", [made[-1].outputs[0], node.inputs[2]], name=f"{node.name}_bias"))
    if made[-1] is not product:
        product.outputs[0].type = output.type
        product.outputs[0].name = f"{output.name}_product"
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], made, [output], [made[-1].outputs[0]])
    if before is not None and not before.outputs[0].uses():
        before.graph.remove(before, safe=True)


def take_rows(node: Any, stored: StoredMatrix) -> None:
    """Replace a ``Gather`` of embedding rows by ``GatherBlockQuantized``, which reads a quantized matrix."""
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
    """Return nodes that reshape a value to its first ``rank`` axes followed by ``sizes``."""
    import onnx_ir as ir

    shape = ir.node("Constant", [], {"value_ints": [*[0] * rank, *sizes]})
    return [shape, ir.node("Reshape", [value, shape.outputs[0]])]


def plus(value: Any, offset: Any, stored: StoredMatrix) -> list[Any]:
    """Return nodes that add float32 offsets to a value; if the value is float16, the offsets are cast to float16."""
    import onnx_ir as ir

    cast = [ir.node("Cast", [offset], {"to": ir.DataType.FLOAT16.value})] if stored.is_half else []
    return [*cast, ir.node("Add", [value, cast[0].outputs[0] if cast else offset])]


_ROWS = 16
"""Number of rows of a matrix that are read to find out whether its weights are integers times scales."""


def holds_integers(module: torch.nn.Module) -> bool:
    """Return whether some weights of a module are integers times a scale, as in a quantized checkpoint."""
    matrices = (weight for weight in module.parameters() if weight.dim() == 2)
    kinds = torch.float32, torch.float16
    return any(
        find_grid(numpy.ascontiguousarray(weight[:_ROWS].detach().numpy())) is not None
        for weight in matrices
        if weight.dtype in kinds
    )


class Grids:
    """Caches the integers and scales of weights, which are needed each time the file is written."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bool], WeightGrid | None] = {}

    def find(self, value: Any, *, transposed: bool) -> WeightGrid | None:
        key = value.name, transposed
        if key not in self._known:
            array = value.const_value.numpy()
            self._known[key] = find_grid(array if transposed else numpy.ascontiguousarray(array.T))
            del array
            unmap(value.const_value)
        return self._known[key]

    def is_exact(self, value: Any, bits: int, *, transposed: bool) -> bool:
        grid = self.find(value, transposed=transposed)
        return grid is not None and grid.bits <= bits


def keep_integers(graph: Any, value: Any, grid: WeightGrid, *, transposed: bool) -> StoredMatrix:
    import onnx_ir as ir

    name, is_half = f"{value.name}{'' if transposed else '_T'}", value.const_value.dtype.name == "FLOAT16"
    held = [new_value(graph, f"{name}_Q{grid.bits}", ir.tensor(grid.packed()))]
    # scales in the dtype of the inputs: with scales that the graph casts, MatMulNBits returns zeros if onnxruntime's
    # graph optimization is turned off
    held.append(new_value(graph, f"{name}_scales", ir.tensor(grid.scales.astype(value.const_value.dtype.numpy()))))
    parts = list(held)
    if grid.zeros is not None:
        parts.append(new_value(graph, f"{name}_zero_points", ir.tensor(grid.packed_zeros())))
        held.append(parts[-1])
    offsets = None
    if grid.lowest is not None:
        held.append(new_value(graph, f"{name}_lowest", ir.tensor(grid.lowest)))
        # weights `(number - middle) * scale` need the offset `lowest + middle * scale`, in float32
        first = graph[0]
        middle = ir.node("Constant", [], {"value": ir.tensor(float(grid.middle), dtype=ir.DataType.FLOAT)})
        graph.insert_before(first, middle)
        lowest, scales = (cast_value(graph, value, ir.DataType.FLOAT) for value in (held[-1], held[1]))
        times = ir.node("Mul", [scales, middle.outputs[0]])
        total = ir.node("Add", [lowest, times.outputs[0]])
        graph.insert_before(first, [times, total])
        offsets = total.outputs[0]
    nbytes = sum(one.const_value.nbytes for one in held)
    columns, blocks, size = grid.numbers.shape
    return StoredMatrix(grid.bits, size, blocks * size, columns, parts, nbytes, offsets, is_half)


def cast_value(graph: Any, value: Any, dtype: Any) -> Any:
    """Return a value of the graph cast to another dtype; onnxruntime casts constants when it loads the file."""
    import onnx_ir as ir

    if value.const_value.dtype == dtype:
        return value
    cast = ir.node("Cast", [value], {"to": int(dtype)})
    graph.insert_before(graph[0], cast)
    cast.outputs[0].dtype, cast.outputs[0].shape = dtype, value.shape
    return cast.outputs[0]


# Multiply with a matrix in 8 bits at nearly the precision of float inputs.
#
#     x ──┬── round to 8 bits in blocks ──┬── high ──┬── Concat ── MatMulNBits ── Split ── Add ──> y
#         └───────── minus ───────────────┴── low ───┘
#
# onnxruntime rounds the inputs of an 8-bit matrix to 8 bits, in blocks with a scale each. `high` is already rounded in
# this way, so onnxruntime does not change it; `low` is 254 times smaller, and has its own scale. Both are rows of one
# product, which reads each weight once and hardly takes longer than a product of one row.
#
#     x ──┬── Clip ──┬────────── small ──┬── Concat ── MatMulNBits ── Split ── Add ──> y
#         └── minus ─┴── rest of large ──┘
#
# With a limit for small values (`input_splits`), three nodes are enough: the scale of a block no longer depends on its
# few large values, and the remainder of a large value, which is alone in its block, is exact.
#
#     x ──┬── Mul by 0 or 1 ──── small ── MatMulNBits ──┬── Add ──> y
#         └── Gather ── large channels ── MatMul ───────┘
#                                           rows of W in float
#
# Two rows take twice the time for many tokens. If the same channels are large for all tokens, as after a norm, a
# separate product in float is faster (LLM.int8(), Dettmers et al. 2022). It is joined with the product for the offsets
# of blocks.


@dataclasses.dataclass(frozen=True)
class InputSplit:
    """How large values in the input of a quantized matrix product are separated: by size, or by channel."""

    limit: float = math.inf  # largest absolute value of the small part; infinite if the input is not split
    channels: tuple[int, ...] = ()  # channels that are large for all tokens, and are multiplied in float


InputSplits: TypeAlias = Mapping[str, InputSplit]
"""By the name of an activation in the ONNX graph: how the activation is split in two parts."""

_LEAST = 1e-30  # added to the largest value of a block, by which its scale is computed, because it may be 0


class SplitInputs:
    """Splits inputs of quantized products into small and large values; equal inputs share the added nodes."""

    def __init__(self, splits: InputSplits) -> None:
        self._splits = splits
        self._rows: dict[tuple[ir.Graph, ir.Value, int], ir.Value] = {}
        self._large: dict[tuple[ir.Graph, ir.Value], tuple[ir.Value, ir.Value]] = {}

    def of(self, x: ir.Value) -> InputSplit | None:
        """Return how to separate small and large values of ``x``, or ``None`` if ``x`` was not measured on a text."""
        return self._splits.get(str(x.name))

    def rows(self, graph: ir.Graph, x: ir.Value, rank: int, stored: StoredMatrix) -> tuple[list[ir.Node], ir.Value]:
        """Return the added nodes, and a value with the small values of ``x`` and, below on axis 0, the large values."""
        import onnx_ir as ir

        key, split = (graph, x, stored.block_size), self.of(x)
        if key in self._rows:
            return [], self._rows[key]
        if split is None:
            made = _by_blocks(x, rank, stored)
        else:  # small values, and the remainder of large values
            ends = [ir.node("Constant", [], {"value_float": end}) for end in (-split.limit, split.limit)]
            small = ir.node("Clip", [x, *(end.outputs[0] for end in ends)])
            rest = ir.node("Sub", [x, small.outputs[0]])
            made = [*ends, small, rest, ir.node("Concat", [small.outputs[0], rest.outputs[0]], {"axis": 0})]
        self._rows[key] = made[-1].outputs[0]
        return made, self._rows[key]

    def large(self, graph: ir.Graph, x: ir.Value, size: int) -> tuple[list[ir.Node], ir.Value, ir.Value]:
        """Return the added nodes, the input with zeros in its large channels, and the values of the large channels."""
        import onnx_ir as ir

        made: list[ir.Node] = []
        if (graph, x) not in self._large:
            channels = numpy.array(self._splits[str(x.name)].channels)
            is_small = numpy.ones(size, numpy.float32)
            is_small[channels] = 0
            held = [ir.node("Constant", [], {"value": ir.tensor(array)}) for array in (is_small, channels)]
            taken = [one.outputs[0] for one in held]
            made = [*held, ir.node("Mul", [x, taken[0]]), ir.node("Gather", [x, taken[1]], {"axis": -1})]
            self._large[graph, x] = made[-2].outputs[0], made[-1].outputs[0]
        return made, *self._large[graph, x]

    @staticmethod
    def joined(product: ir.Value) -> list[ir.Node]:
        """Return nodes that add the first and the second half of a product on axis 0 (of small and of large values)."""
        import onnx_ir as ir

        parts = ir.node("Split", [product], {"axis": 0, "num_outputs": 2}, num_outputs=2)
        return [parts, ir.node("Add", list(parts.outputs))]


def _by_blocks(x: ir.Value, rank: int, stored: StoredMatrix) -> list[ir.Node]:
    """Split inputs into values rounded as ``MatMulNBits`` rounds its inputs, and the rounding errors."""
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
