"""A quantized matrix in a graph, and the rows that an embedding reads of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from .weight_grid import WeightGrid, find_grid
from .weights import unmap


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    """A quantized matrix in a graph."""

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
    """Replace a ``Gather`` of rows, which are the columns of a quantized matrix."""
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


# Keep the integers and scales that weights of a graph were made of, instead of rounding them again.


_ROWS = 16
"""Rows of a matrix that are looked at to know whether a model has such weights at all."""


def holds_integers(module: torch.nn.Module) -> bool:
    """Return whether weights of a module are integers with scales."""
    matrices = (weight for weight in module.parameters() if weight.dim() == 2)
    kinds = torch.float32, torch.float16
    return any(
        find_grid(numpy.ascontiguousarray(weight[:_ROWS].detach().numpy())) is not None
        for weight in matrices
        if weight.dtype in kinds
    )


class Grids:
    """The integers and scales of weights, searched for once: a file is written several times."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bool], WeightGrid | None] = {}

    def find(self, value: Any, *, transposed: bool) -> WeightGrid | None:
        """Return the integers and scales of a weight, ``None`` where it has none."""
        key = value.name, transposed
        if key not in self._known:
            array = value.const_value.numpy()
            self._known[key] = find_grid(array if transposed else numpy.ascontiguousarray(array.T))
            del array
            unmap(value.const_value)
        return self._known[key]

    def is_exact(self, value: Any, bits: int, *, transposed: bool) -> bool:
        """Whether a weight has integers with at most this many bits."""
        grid = self.find(value, transposed=transposed)
        return grid is not None and grid.bits <= bits


def keep_integers(graph: Any, value: Any, grid: WeightGrid, *, transposed: bool) -> StoredMatrix:
    """Put the integers and scales of a weight into a graph."""
    import onnx_ir as ir

    name, is_half = f"{value.name}{'' if transposed else '_T'}", value.const_value.dtype.name == "FLOAT16"
    held = [new_value(graph, f"{name}_Q{grid.bits}", ir.tensor(grid.packed()))]
    # of the type that is multiplied: with scales that the graph converts the operator computes zeros, and no error,
    # where onnxruntime's optimisation, which converts them before, is turned off
    held.append(new_value(graph, f"{name}_scales", ir.tensor(grid.scales.astype(value.const_value.dtype.numpy()))))
    parts = list(held)
    if grid.zeros is not None:
        parts.append(new_value(graph, f"{name}_zero_points", ir.tensor(grid.packed_zeros())))
        held.append(parts[-1])
    offsets = None
    if grid.lowest is not None:
        held.append(new_value(graph, f"{name}_lowest", ir.tensor(grid.lowest)))
        offsets = block_offsets(graph, held[-1], held[1], grid.middle)
    nbytes = sum(one.const_value.nbytes for one in held)
    columns, blocks, size = grid.numbers.shape
    has_large = blocks * size > int(value.const_value.shape[1 if transposed else 0])
    return StoredMatrix(grid.bits, size, blocks * size, columns, parts, nbytes, offsets, is_half, has_large)


def cast_value(graph: Any, value: Any, dtype: Any) -> Any:
    """The same numbers in the type that the operator multiplies; onnxruntime converts them when it loads a file."""
    import onnx_ir as ir

    if value.const_value.dtype == dtype:
        return value
    cast = ir.node("Cast", [value], {"to": int(dtype)})
    graph.insert_before(graph[0], cast)
    cast.outputs[0].dtype, cast.outputs[0].shape = dtype, value.shape
    return cast.outputs[0]


def block_offsets(graph: Any, lowest: Any, scales: Any, number: int) -> Any:
    """The offset of ``(number - middle) * scale``: ``lowest + middle * scale``, in float32."""
    import onnx_ir as ir

    first = graph[0]
    middle = ir.node("Constant", [], {"value": ir.tensor(float(number), dtype=ir.DataType.FLOAT)})
    graph.insert_before(first, middle)
    wide = [cast_value(graph, value, ir.DataType.FLOAT) for value in (lowest, scales)]
    times = ir.node("Mul", [wide[1], middle.outputs[0]])
    plus = ir.node("Add", [wide[0], times.outputs[0]])
    graph.insert_before(first, [times, plus])
    return plus.outputs[0]
