"""Keep the integers and scales that weights of a graph were made of, instead of rounding them again."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from .stored_matrix import StoredMatrix, new_value
from .weight_grid import WeightGrid, find_grid
from .weights import unmap

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
        """Whether a weight has integers of so many bits or fewer."""
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
    """What is added to ``(number - middle) * scale``: ``lowest + middle * scale``, in float32."""
    import onnx_ir as ir

    first = graph[0]
    middle = ir.node("Constant", [], {"value": ir.tensor(float(number), dtype=ir.DataType.FLOAT)})
    graph.insert_before(first, middle)
    wide = [cast_value(graph, value, ir.DataType.FLOAT) for value in (lowest, scales)]
    times = ir.node("Mul", [wide[1], middle.outputs[0]])
    plus = ir.node("Add", [wide[0], times.outputs[0]])
    graph.insert_before(first, [times, plus])
    return plus.outputs[0]
