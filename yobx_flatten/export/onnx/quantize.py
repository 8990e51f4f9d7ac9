"""Store the weights of linear layers in 8 or 4 bits: blocks of integers with a scale and a zero point each."""

# x ── MatMul(x, W) ──> y      becomes      x ── MatMulNBits(x, bits of W, scales, zero points) ──> y
# 4 bytes per weight become, in blocks of 32 weights, 1.16 bytes per weight with 8 bits, and 0.64 with 4 bits

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy

from ...errors import InvalidArgumentError
from ...trace.onnx_repairs import ir
from ..proof.report import ExportReport
from ..quantization import Bits, Quantization, Role, nothing_kept, remark_of_kept
from .rewrite.graph import Nodes, attribute
from .rounding import RoundedMatrices
from .weights import (
    Floats,
    Grids,
    InputSplits,
    StoredMatrix,
    cast_value,
    keep_integers,
    new_value,
    plus,
    products_of,
    read_columns,
    replace_product,
    take_rows,
    unmap,
)

_TABLE = 2**16
"""Smallest number of weights at which an embedding table is stored in 8 bits."""


@dataclasses.dataclass
class QuantizedWeights:
    count: int = 0  # number of matrices
    float_bytes: int = 0  # size of the matrices before
    bytes: int = 0  # size of the matrices with scales and zero points
    tied: list[str] = dataclasses.field(default_factory=list)  # names of matrices that are also stored unquantized
    shared: list[str] = dataclasses.field(default_factory=list)  # names of matrices that an embedding also reads
    roles: dict[str, Role] = dataclasses.field(default_factory=dict)
    kept: dict[int, int] = dataclasses.field(default_factory=dict)  # weights that were integers already, by their bits
    by_text: int = 0  # number of matrices that were rounded with a calibration text
    tables: int = 0  # number of embedding tables that were rounded to 8 bits
    by_token: int = 0  # number of matrices with one scale per output, and activations with one scale per token
    blocks: dict[int, int] = dataclasses.field(default_factory=dict)  # weights by block size; 0: a scale per output

    @property
    def block_size(self) -> int:
        """The most common block size in quantized linear layers; 0 for one scale per output, or without such layers."""
        return max(self.blocks, key=self.blocks.__getitem__, default=0)

    def add(self, value: Any, nbytes: int, kept_bits: int | None = None) -> None:
        # nbytes: size with scales and zero points
        # kept_bits: bits of the original integers, if the matrix is stored as these
        self.count += 1
        self.float_bytes += value.const_value.nbytes
        self.bytes += nbytes
        if kept_bits is not None:
            self.kept[kept_bits] = self.kept.get(kept_bits, 0) + math.prod(value.const_value.shape)


def quantize_model(
    model: Any,
    quantization: Quantization,
    bits: Bits | None = None,
    grids: Grids | None = None,
    rounded: RoundedMatrices | None = None,
    *,
    rounds_inputs: bool = True,
    splits: InputSplits | None = None,
    found: QuantizedWeights | None = None,
) -> QuantizedWeights:
    """Replace the weights of all linear layers of a model by weights that are quantized when the file is written."""
    # a matrix whose values are already integers times scales keeps its integers, if they fit into the requested bits
    # bits: bits by role; the bits of the quantization for all other roles
    # rounded: matrices that were rounded with a calibration text
    # rounds_inputs: whether the activations are quantized to 8 bits
    # found: gets the counts; may contain matrices that were quantized earlier
    grids = Grids() if grids is None else grids
    widths = () if quantization.weights == "keep" else (4, 8)
    found = QuantizedWeights() if found is None else found
    parts = _Parts(Quantization("int4", quantization.block_size))
    stored: dict[tuple[str, bool], StoredMatrix | None] = {}
    read: dict[str, tuple[Any, bool]] = {}
    products = Products(model.graph, splits or {})
    nodes = products_of(model, quantization.block_size)
    for node, (value, transposed) in nodes:
        key, name = (value.name, transposed), _role_of(node, value)
        if key not in stored:
            grid = grids.find(value, transposed=transposed) if node.inputs[0].shape is not None else None
            before, size = found.roles.get(name, Role(name, 0, 0, False, 0)), math.prod(value.const_value.shape)
            is_last = before.is_last or node is nodes[-1][0]
            exact = max(before.exact, 32 if grid is None else grid.bits)
            found.roles[name] = Role(name, before.count + 1, before.size + size, is_last, exact)
            width = quantization.bits if bits is None else bits.get(name, quantization.bits)
            if grid is not None and grid.bits <= width:
                stored[key] = keep_integers(model.graph, value, grid, transposed=transposed)
            elif rounded is not None and key in rounded and rounded[key].bits == width:
                stored[key] = keep_integers(model.graph, value, rounded[key], transposed=transposed)
                found.by_text += 1
            elif width in widths:
                stored[key] = _rounded(model.graph, value, transposed, parts, quantization, width)
            else:
                stored[key] = None
            if (matrix := stored[key]) is not None:
                found.add(value, matrix.nbytes, grid.bits if grid is not None and grid.bits <= width else None)
                found.blocks[matrix.block_size] = found.blocks.get(matrix.block_size, 0) + matrix.rows * matrix.columns
                read[value.name] = value, transposed
        if (matrix := stored[key]) is not None:
            products.replace(node, matrix, (value, transposed), rounds_inputs=rounds_inputs)
    tables = [value for value in gathered(model.graph) if value.name not in read]
    for value in tables:
        if (matrix := _quantized_table(model.graph, value, quantization, grids, found)) is not None:
            stored[value.name, True] = matrix
            read[value.name] = value, True
    if found.count:
        model.opset_imports["com.microsoft"] = 1
    for name, (value, transposed) in read.items():
        matrix, readers = stored[name, transposed], [use.node for use in value.uses()]
        are_whole = matrix is not None and value.const_value.shape[1] % matrix.block_size == 0
        if transposed and matrix is not None and are_whole and readers and _is_gathered(value):
            for node in readers:
                take_rows(node, matrix)
            if value not in tables:
                found.shared.append(name)
        if value.uses() or value.is_graph_output():  # another node reads the unquantized matrix
            found.tied.append(value.name)
        else:
            del model.graph.initializers[value.name]
    return found


def _quantized_table(
    graph: Any, value: Any, quantization: Quantization, grids: Grids, found: QuantizedWeights
) -> StoredMatrix | None:
    """Store an embedding table in 8 bits, or as the checkpoint's integers and scales; ``None`` if not possible."""
    grid, shape = grids.find(value, transposed=True), value.const_value.shape
    if grid is not None:
        matrix = keep_integers(graph, value, grid, transposed=True)
    else:
        block = next((block for block in _TABLE_BLOCKS if shape[1] % block == 0), None)
        if quantization.weights == "keep" or math.prod(shape) < _TABLE or block is None:
            return None
        matrix = round_to_8_bits(graph, value, block, transposed=True, is_table=True)
        found.tables += 1
    found.add(value, matrix.nbytes, None if grid is None else grid.bits)
    return matrix


def _role_of(node: Any, value: Any) -> str:
    """Return the module path of a matrix product with ``*`` for layer numbers, or else the shape of the weight."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
    names = [name for name in re.findall(r"'([^']*)'", scopes)[:-1] if name]  # the last name is the operator
    if not names:
        return " x ".join(map(str, value.const_value.shape))
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", names[-1])


def check_quantized(found: QuantizedWeights, quantization: Quantization, report: ExportReport) -> None:
    if not found.roles:
        raise InvalidArgumentError(
            f"quantize={quantization.weights!r}: {report.module} has no linear layer with at least "
            f"{quantization.block_size} input and output features. Use a smaller block_size, or leave quantize out."
        )
    if not found.count and quantization.weights == "keep":
        raise nothing_kept(report.module)


def remark_quantized(
    found: QuantizedWeights, quantization: Quantization, report: ExportReport, bits: Bits | None = None
) -> None:
    kind, sizes = quantization.weights, f"{found.bytes / 1e6:.2f} MB instead of {found.float_bytes / 1e6:.2f} MB"
    if kind == "keep":
        report.remark(
            f"{found.count} weights are stored as their original integers, {sizes}; all others are unchanged."
        )
    else:
        more = " or more" if bits and set(bits.values()) != {quantization.bits} else ""
        others = "norms" if found.tables else "embeddings and norms"
        report.remark(f"{found.count} weights are stored in {kind}{more}, {sizes}; {others} are unchanged.")
    if found.by_token:
        report.remark(
            f"{found.by_token} of the quantized weights have one scale per output, and 8-bit activations with one "
            "scale per token: faster for many tokens."
        )
    if found.by_text:
        report.remark(f"{found.by_text} of the quantized weights were rounded with a text, as GPTQ does.")
    if found.tables:
        report.remark(f"{found.tables} of the quantized weights are embedding tables, in int8.")
    if found.kept:
        report.remark(remark_of_kept(found.kept))
    for width, stored in ((8, "int8"), (32, "full")):
        roles = [role for role in found.roles.values() if bits and bits[role.name] == width > quantization.bits]
        names = ", ".join(f"{role.name} ({role.count} of {role.size / 1e6:.3g} million weights)" for role in roles)
        if roles:
            report.remark(f"stored in {stored}, to keep the file close enough to the model: {names}")
    if found.shared:
        report.remark(f"{', '.join(found.shared)} is in the file once: embedding and projection share it.")
    if found.tied:
        report.remark(
            f"{', '.join(found.tied)} is in the file twice, in full for the embedding and in {kind} for the projection "
            "that is tied to it."
        )


class _Parts:
    """Quantizes a weight when its integers, scales or zero points are read, and caches the last weight only."""

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization
        self._weight: Any = None
        self._parts: tuple[Any, ...] = ()

    def part(self, tensor: Any, transposed: bool, index: int) -> Any:
        """Return the packed integers (``index`` 0), scales (1) or zero points (2) of a quantized weight."""
        if self._weight != (id(tensor), transposed):
            array = tensor.numpy()
            self._parts = self._quantization.quantize(numpy.ascontiguousarray(array.T if transposed else array))
            self._weight = id(tensor), transposed
            del array
            unmap(tensor)
        return ir.tensor(self._parts[index])


def _rounded(
    graph: Any, value: Any, transposed: bool, parts: _Parts, quantization: Quantization, bits: int
) -> StoredMatrix:
    """Add a quantized copy of a weight to a graph; the copy is computed when the file is written."""
    if bits == 8:
        size = quantization.block_for(8, int(value.const_value.shape[1 if transposed else 0]))
        return round_to_8_bits(graph, value, size, transposed=transposed)
    tensor, size = value.const_value, quantization.block_size
    columns, rows = map(int, tensor.shape if transposed else reversed(tensor.shape))
    blocks = -(-rows // size)
    held = (  # two integers, or two zero points, in each byte
        ("Q4", [columns, blocks, size // 2], ir.DataType.UINT8),
        ("scales", [columns, blocks], tensor.dtype),
        ("zero_points", [columns, -(-blocks // 2)], ir.DataType.UINT8),
    )
    values = []
    for index, (suffix, shape, dtype) in enumerate(held):
        name = f"{value.name}{'_T' if transposed else ''}_{suffix}"
        read = functools.partial(parts.part, tensor, transposed, index)
        values.append(new_value(graph, name, ir.LazyTensor(read, dtype=dtype, shape=ir.Shape(shape), name=name)))
    return StoredMatrix(bits, size, rows, columns, values, sum(one.const_value.nbytes for one in values))


_FLOATS, _INTEGERS = 1, 4
"""The ``accuracy_level`` of onnxruntime: 1 multiplies floats; 4 rounds inputs to 8 bits and multiplies integers. Level
1 takes a third longer than 4 with 4-bit weights, and 15 times as long with 8-bit weights (no kernel)."""

_TINY = 1e-30  # added to the largest value of a block, by which its scale is computed, because it may be 0

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


class Products:
    """Replaces matrix products of a graph by ``MatMulNBits`` nodes, which multiply by quantized weights."""

    def __init__(self, graph: Any, splits: InputSplits) -> None:
        self._graph = graph  # the main graph, which stores the matrices
        self._sums: dict[tuple[Any, int, bool], Any] = {}
        self._terms: dict[tuple[Any, Any], Any] = {}
        self._large: dict[tuple[str, bool, Sequence[int]], Any] = {}
        self._splits = splits
        self._rows: dict[tuple[ir.Graph, ir.Value, int], ir.Value] = {}
        self._apart_inputs: dict[tuple[ir.Graph, ir.Value], tuple[ir.Value, ir.Value]] = {}

    def replace(self, node: Any, stored: StoredMatrix, weight: tuple[Any, bool], *, rounds_inputs: bool) -> None:
        # weight: the unquantized matrix, and whether it is transposed
        sizes = {"K": stored.rows, "N": stored.columns, "bits": stored.bits, "block_size": stored.block_size}
        x = node.inputs[0]
        # a product can keep its inputs in float if they are float32, and their size is a multiple of the block
        is_float = stored.parts[1].const_value.dtype.name == "FLOAT" and stored.rows % stored.block_size == 0
        rounds_inputs = rounds_inputs or not is_float or x.shape is None or len(x.shape) < 2
        split = None if rounds_inputs else self._splits.get(str(x.name))
        sizes["accuracy_level"] = _FLOATS if stored.bits == 4 and not rounds_inputs and split is None else _INTEGERS
        made = Nodes()
        rows = small = x
        terms: list[tuple[Any, Any]] = []  # inputs and matrices of float products to add
        in_two = not rounds_inputs and (stored.bits == 8 if split is None else split.limit < math.inf)
        if split is not None and split.channels:
            small, large = self._apart(made, node.graph, x, stored.rows)
            rows, in_two = small, False
            terms.append((large, self._rows_of(*weight, split.channels)))
        elif in_two:
            rows = self._in_two(made, node.graph, x, len(x.shape), stored)
        product = made.add("MatMulNBits", rows, *stored.parts, domain="com.microsoft", name=node.name, **sizes)
        found = product
        if in_two:  # the product of small values, and below the product of large values
            made.append(ir.node("Split", [product], {"axis": 0, "num_outputs": 2}, num_outputs=2))
            found = made.add("Add", *made[-1].outputs)
        if stored.offsets is not None:
            key = small, stored.block_size, stored.is_half
            sums = self._sums.get(key)  # of each block of the input, in float32
            if sums is None or sums.producer().graph is not node.graph:
                exact = made.add("Cast", small, to=ir.DataType.FLOAT.value) if stored.is_half else small
                cut = made.reshape(exact, *[0] * (len(x.shape) - 1), stored.blocks, stored.block_size)
                sums = made.add("ReduceSum", cut, made.add("Constant", value_ints=[-1]), keepdims=0)
                self._sums[key] = sums
            terms.insert(0, (sums, made.add("Transpose", stored.offsets, perm=[1, 0])))
        if len(terms) == 2:  # one product computes the sum of both products
            inputs, matrices = zip(*terms, strict=True)
            if inputs not in self._terms:
                self._terms[inputs] = made.add("Concat", *inputs, axis=-1)
            terms = [(self._terms[inputs], made.add("Concat", *matrices, axis=0))]
        if terms:
            plus(made, found, made.add("MatMul", *terms[0]), stored)
        replace_product(node, product, made)

    def _in_two(self, made: Nodes, graph: ir.Graph, x: ir.Value, rank: int, stored: StoredMatrix) -> ir.Value:
        """Return two tensors whose sum is ``x`` (rounded or clipped values, and the rest), concatenated on axis 0."""
        key, split, kept = (graph, x, stored.block_size), self._splits.get(str(x.name)), [0] * (rank - 1)
        if key in self._rows:
            return self._rows[key]
        if split is None:  # values rounded as `MatMulNBits` rounds its inputs, and the rounding errors
            cut = made.reshape(x, *kept, stored.blocks, stored.block_size)
            each, most = made.add("Constant", value_ints=[-1]), made.add("Constant", value_float=127.0)
            largest = made.add("ReduceMax", made.add("Abs", cut), each, keepdims=1)
            per_unit = made.add("Div", most, made.add("Add", largest, made.add("Constant", value_float=_TINY)))
            high = made.add("Div", made.add("Round", made.add("Mul", cut, per_unit)), per_unit)
            both = made.add("Concat", high, made.add("Sub", cut, high), axis=0)
            self._rows[key] = made.reshape(both, *kept, stored.rows)
        else:  # small values, and the remainder of large values
            ends = [made.add("Constant", value_float=end) for end in (-split.limit, split.limit)]
            small = made.add("Clip", x, *ends)
            self._rows[key] = made.add("Concat", small, made.add("Sub", x, small), axis=0)
        return self._rows[key]

    def _apart(self, made: Nodes, graph: ir.Graph, x: ir.Value, size: int) -> tuple[ir.Value, ir.Value]:
        """Return an input with zeros in its large channels, and the values of the large channels."""
        if (graph, x) not in self._apart_inputs:
            channels = numpy.array(self._splits[str(x.name)].channels)
            is_small = numpy.ones(size, numpy.float32)
            is_small[channels] = 0
            factors, places = (made.add("Constant", value=ir.tensor(array)) for array in (is_small, channels))
            self._apart_inputs[graph, x] = made.add("Mul", x, factors), made.add("Gather", x, places, axis=-1)
        return self._apart_inputs[graph, x]

    def _rows_of(self, value: Any, transposed: bool, channels: Sequence[int]) -> Any:
        """Return a constant of the graph with the rows of a weight matrix that multiply the given input channels."""
        key = value.name, transposed, channels  # layers may share a matrix, and have different large channels
        if key not in self._large:
            array = value.const_value.numpy()
            rows = numpy.ascontiguousarray((array.T if transposed else array)[list(channels)])
            del array
            unmap(value.const_value)
            self._large[key] = new_value(self._graph, f"{value.name}_large_{len(self._large)}", ir.tensor(rows))
        return self._large[key]


def gathered(graph: Any) -> list[Any]:
    """Return the matrices that only ``Gather`` nodes read, row by row, such as embedding tables."""
    held = [value for value in graph.initializers.values() if value.const_value is not None and value.uses()]
    matrices = [value for value in held if len(value.const_value.shape) == 2 and _is_gathered(value)]
    return [value for value in matrices if value.const_value.dtype.name in ("FLOAT", "FLOAT16")]


def _is_gathered(value: Any) -> bool:
    plain = all(
        use.node.op_type == "Gather" and use.node.inputs[0] is value and attribute(use.node, "axis", 0) == 0
        for use in value.uses()
    )
    return plain and not value.is_graph_output()


# Round matrices to 8 bits: integers from -127 to 127 times one scale for each block, without zero points.

_MOST = 127
_MIDDLE = 128

_TABLE_BLOCKS = (128, 64, 32, 16)
"""Block sizes that an embedding table may have: table rows are read, not summed, so large blocks add no error."""


def round_to_8_bits(graph: Any, value: Any, size: int, *, transposed: bool, is_table: bool = False) -> StoredMatrix:
    """Add an 8-bit copy of a matrix to a graph; the weights are rounded when the file is written."""
    # is_table: whether only `Gather` reads the matrix. Only then are scales stored in float16 and cast in the graph:
    # with cast scales, MatMulNBits returns zeros if onnxruntime's graph optimization is turned off.
    tensor = value.const_value
    columns, rows = map(int, tensor.shape if transposed else reversed(tensor.shape))
    blocks, name = -(-rows // size), f"{value.name}{'_T' if transposed else ''}"
    is_short = False  # whether all scales are in the range of float16
    if is_table:
        scales = numpy.abs(_blocks(read_columns(tensor, transposed), size)).max(2) / _MOST
        scales = scales[scales > 0]
        is_short = not scales.size or bool(scales.min() >= 2.0**-14 and scales.max() < 2.0**15)
    unmap(tensor)
    kind = ir.DataType.FLOAT16 if is_short else tensor.dtype
    made = []
    held = [("Q8", [columns, blocks, size], ir.DataType.UINT8), ("scales", [columns, blocks], kind)]
    for index, (suffix, shape, dtype) in enumerate(held):
        read = functools.partial(_part, tensor, transposed, size, kind.numpy(), index)
        lazy = ir.LazyTensor(read, dtype=dtype, shape=ir.Shape(shape), name=f"{name}_{suffix}")
        made.append(new_value(graph, f"{name}_{suffix}", lazy))
    nbytes = sum(one.const_value.nbytes for one in made)
    parts = [made[0], cast_value(graph, made[1], tensor.dtype)]
    return StoredMatrix(8, size, rows, columns, parts, nbytes, is_half=tensor.dtype.name == "FLOAT16")


def _blocks(matrix: Floats, size: int) -> Floats:
    filled: Floats = numpy.pad(matrix, ((0, 0), (0, -matrix.shape[1] % size)))
    return filled.reshape(len(matrix), -1, size)


def _part(tensor: Any, transposed: bool, size: int, kind: Any, index: int) -> Any:
    """Return the integers of a matrix in 8 bits (``index`` 0), or the scales of its blocks (``index`` 1)."""
    blocks = _blocks(read_columns(tensor, transposed), size).astype(numpy.float32)
    unmap(tensor)
    scales = (numpy.abs(blocks).max(2) / _MOST).astype(kind)
    if index == 1:
        return ir.tensor(scales)
    wide = scales[..., None].astype(numpy.float32)
    steps = numpy.where(wide == 0, numpy.float32(1), wide)  # the scale of a block of zeros is 0
    return ir.tensor((numpy.rint(blocks / steps).clip(-_MOST, _MOST) + _MIDDLE).astype(numpy.uint8))
