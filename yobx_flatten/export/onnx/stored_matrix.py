"""Add quantized matrices to an ONNX graph, read embedding rows of them, and split activations by magnitude."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy
import torch

from ...trace.onnx_repairs import ir
from .rewrite.graph import Nodes, attribute
from .weights import WeightGrid, find_grid, pairs, unmap


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
    def blocks(self) -> int:  # in a column of the matrix
        return -(-self.rows // self.block_size)


def new_value(graph: Any, name: str, tensor: Any) -> Any:
    value = ir.Value(name=name, const_value=tensor)
    value.shape, value.type = tensor.shape, ir.TensorType(tensor.dtype)
    graph.register_initializer(value)
    return value


def replace_product(node: Any, product: ir.Value, made: Nodes) -> None:
    """Replace a ``MatMul`` or ``Gemm`` by the nodes of a quantized product, and add the bias of the ``Gemm``."""
    output, before = node.outputs[0], node.inputs[1].producer()
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
        made.add("Add", made[-1].outputs[0], node.inputs[2], name=f"{node.name}_bias")
    found = made[-1].outputs[0]
    if found is not product:
        product.type, product.name = output.type, f"{output.name}_product"
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], made, [output], [found])
    if before is not None and not before.outputs[0].uses():
        before.graph.remove(before, safe=True)


def is_in_main_graph(value: Any, graph: Any) -> bool:
    """Return whether a node outside of loops and branches computes a value, which can then be an output of the file."""
    return value.producer() is not None and value.producer().graph is graph


def products_of(model: Any, block_size: int) -> list[tuple[Any, tuple[Any, bool]]]:
    """Return the matrix products to quantize, with the weight of each product and whether the weight is transposed."""
    found = []
    for node in model.graph.all_nodes():
        if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm"):
            continue
        value, transposed = node.inputs[1], False
        if node.op_type == "Gemm":
            factors = {attribute(node, "alpha", 1.0), attribute(node, "beta", 1.0)}
            if factors != {1.0} or attribute(node, "transA", 0):
                continue
            transposed = bool(attribute(node, "transB", 0))
        before = value.producer()
        if before is not None and before.op_type == "Transpose" and list(attribute(before, "perm", [1, 0])) == [1, 0]:
            value, transposed = before.inputs[0], not transposed
        tensor = value.const_value
        if not value.is_initializer() or tensor is None or len(tensor.shape) != 2:
            continue
        # quantizing less than one block, such as a gate or a classification head, saves nothing
        if min(tensor.shape) >= block_size and tensor.dtype.name in ("FLOAT", "FLOAT16"):
            found.append((node, (value, transposed)))
    return found


def take_rows(node: Any, stored: StoredMatrix) -> None:
    """Replace a ``Gather`` of embedding rows by ``GatherBlockQuantized``, which reads a quantized matrix."""
    sizes = {"bits": stored.bits, "block_size": stored.block_size, "gather_axis": 0, "quantize_axis": 1}
    made, rows = Nodes(), node.inputs[1]
    shape = made.add("Constant", value_ints=[stored.columns, -1])
    first, *parts = (made.add("Reshape", part, shape) for part in stored.parts)
    found = made.add("GatherBlockQuantized", first, rows, *parts, domain="com.microsoft", name=node.name, **sizes)
    if stored.offsets is not None:
        kept = [0] * len(rows.shape)
        cut = made.reshape(found, *kept, stored.blocks, stored.block_size)
        offsets = made.add("Gather", stored.offsets, rows, axis=0)
        each = made.add("Unsqueeze", offsets, made.add("Constant", value_ints=[-1]))
        found = made.reshape(plus(made, cut, each, stored), *kept, stored.rows)
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], made, [node.outputs[0]], [found])


def plus(made: Nodes, value: ir.Value, offset: ir.Value, stored: StoredMatrix) -> ir.Value:
    """Add float32 offsets to a value; if the value is float16, the offsets are cast to float16."""
    if stored.is_half:
        offset = made.add("Cast", offset, to=ir.DataType.FLOAT16.value)
    return made.add("Add", value, offset)


_ROWS = 16
"""Number of rows of a matrix that are read to find out whether its weights are integers times scales."""


def holds_integers(module: torch.nn.Module) -> bool:
    """Return whether some weights of a module are integers times a scale, as in a quantized checkpoint."""
    floats = torch.float32, torch.float16
    matrices = (weight for weight in module.parameters() if weight.dim() == 2 and weight.dtype in floats)
    return any(find_grid(numpy.ascontiguousarray(one[:_ROWS].detach().numpy())) is not None for one in matrices)


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
    name, dtype = f"{value.name}{'' if transposed else '_T'}", value.const_value.dtype

    def stored(suffix: str, array: Any) -> Any:
        return new_value(graph, f"{name}_{suffix}", ir.tensor(array))

    # scales in the dtype of the inputs: with scales that the graph casts, MatMulNBits returns zeros if onnxruntime's
    # graph optimization is turned off
    parts = [stored(f"Q{grid.bits}", grid.packed()), stored("scales", grid.scales.astype(dtype.numpy()))]
    if grid.zeros is not None:
        zeros = grid.zeros
        if grid.bits == 4:
            zeros = pairs(numpy.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2))))
        parts.append(stored("zero_points", zeros))
    held, offsets = list(parts), None
    if grid.lowest is not None:
        held.append(stored("lowest", grid.lowest))
        # weights `(number - middle) * scale` need the offset `lowest + middle * scale`, in float32
        first, made = graph[0], Nodes()
        lowest, scales = (cast_value(graph, one, ir.DataType.FLOAT) for one in (held[-1], held[1]))
        middle = made.add("Constant", value=ir.tensor(float(grid.middle), dtype=ir.DataType.FLOAT))
        offsets = made.add("Add", lowest, made.add("Mul", scales, middle))
        graph.insert_before(first, made)
    nbytes = sum(one.const_value.nbytes for one in held)
    columns, blocks, size = grid.numbers.shape
    return StoredMatrix(grid.bits, size, blocks * size, columns, parts, nbytes, offsets, dtype.name == "FLOAT16")


def cast_value(graph: Any, value: Any, dtype: Any) -> Any:
    """Return a value of the graph cast to another dtype; onnxruntime casts constants when it loads the file."""
    if value.const_value.dtype == dtype:
        return value
    cast = ir.node("Cast", [value], {"to": int(dtype)})
    graph.insert_before(graph[0], cast)
    cast.outputs[0].dtype, cast.outputs[0].shape = dtype, value.shape
    return cast.outputs[0]


@dataclasses.dataclass(frozen=True)
class InputSplit:
    """Separates large from small values in the input of a quantized matrix product, by a limit or by channel."""

    limit: float = math.inf  # largest absolute value of the small part; infinite if the input is not split
    channels: tuple[int, ...] = ()  # channels that are large for all tokens, and are multiplied in float


InputSplits: TypeAlias = Mapping[str, InputSplit]
"""By the name of an activation in the ONNX graph: how the activation is split in two parts."""
