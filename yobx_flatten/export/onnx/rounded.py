"""Round matrices to 8 bits: whole steps from -127 to 127 of a scale for each block, and no zero points."""

from __future__ import annotations

import functools
from typing import Any

import numpy

from .kept_integers import cast_value
from .stored_matrix import StoredMatrix, new_value
from .weight_grid import Floats
from .weights import unmap

_MOST = 127
_MIDDLE = 128

_TABLE_BLOCKS = (128, 64, 32, 16)
"""Blocks of a table: its rows are read and not summed, so that larger ones cost nothing that is seen."""


def round_to_8_bits(graph: Any, value: Any, size: int, *, transposed: bool, is_table: bool = False) -> StoredMatrix:
    """Put a matrix in 8 bits into a graph, rounded when it is written."""
    # is_table: whether only rows are gathered: the operator for this takes scales of 16 bits that are converted in the
    # graph. The product computes zeros with these where onnxruntime's optimisation is turned off.
    import onnx_ir as ir

    tensor = value.const_value
    columns, rows = map(int, tensor.shape if transposed else reversed(tensor.shape))
    blocks, name = -(-rows // size), f"{value.name}{'_T' if transposed else ''}"
    is_short = is_table and _are_short(_blocks(_read(tensor, transposed), size))
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


def round_table(graph: Any, value: Any) -> StoredMatrix | None:
    """Put the table of an embedding in 8 bits into a graph; ``None`` where its rows have no whole blocks."""
    width = value.const_value.shape[1]
    size = next((size for size in _TABLE_BLOCKS if width % size == 0), None)
    return None if size is None else round_to_8_bits(graph, value, size, transposed=True, is_table=True)


def _read(tensor: Any, transposed: bool) -> Floats:
    array: Floats = tensor.numpy()
    return array if transposed else numpy.ascontiguousarray(array.T)


def _blocks(matrix: Floats, size: int) -> Floats:
    filled: Floats = numpy.pad(matrix, ((0, 0), (0, -matrix.shape[1] % size)))
    return filled.reshape(len(matrix), -1, size)


def _are_short(blocks: Floats) -> bool:
    """Whether the scales are numbers of float16 to its full precision; nothing is stored in float32 then."""
    scales = numpy.abs(blocks).max(2) / _MOST
    scales = scales[scales > 0]
    return not scales.size or bool(scales.min() >= 2.0**-14 and scales.max() < 2.0**15)


def _part(tensor: Any, transposed: bool, size: int, kind: Any, index: int) -> Any:
    """The integers of a matrix, or its scales."""
    import onnx_ir as ir

    blocks = _blocks(_read(tensor, transposed), size).astype(numpy.float32)
    unmap(tensor)
    return ir.tensor(_parts(blocks, kind)[index])


def _parts(blocks: Floats, kind: Any) -> tuple[Any, ...]:
    """Integers and scales, which are rounded to their type before the integers are."""
    scales = (numpy.abs(blocks).max(2) / _MOST).astype(kind)
    wide = scales[..., None].astype(numpy.float32)
    steps = numpy.where(wide == 0, numpy.float32(1), wide)  # of a block of zeros
    whole = numpy.rint(blocks / steps).clip(-_MOST, _MOST)
    return (whole + _MIDDLE).astype(numpy.uint8), scales
