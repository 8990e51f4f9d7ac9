"""Round matrices to 8 bits: whole steps from -127 to 127 of a scale for each block, and no zero points.

Where it is worth its bits, a block has 255 steps from its lowest weight: weights that were trained on from 4 bits with
lowest weights are near such steps.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy
import numpy.typing as npt

from .kept_integers import block_offsets, cast_value
from .stored_matrix import StoredMatrix, new_value
from .weight_grid import Floats
from .weights import unmap

__all__ = ["round_table", "round_to_8_bits"]

_MOST = 127
_MIDDLE = 128
_LEVELS = 255

_SAMPLE = 64
"""Outputs whose weights decide from where the steps count."""

_TABLE_BLOCKS = (128, 64, 32, 16)
"""Blocks of a table: its rows are read and not summed, so that larger ones cost nothing that is seen."""


def round_to_8_bits(
    graph: Any, value: Any, size: int, *, transposed: bool, is_table: bool = False, has_offsets: bool = False
) -> StoredMatrix:
    """Put a matrix in 8 bits into a graph, rounded when it is written."""
    # has_offsets: whether the product can add what each block is off by
    # is_table: whether only rows are gathered: the operator for this takes scales of 16 bits that are converted in the
    # graph. The product computes zeros with these where onnxruntime's optimisation is turned off.
    import onnx_ir as ir

    tensor = value.const_value
    columns, rows = map(int, tensor.shape if transposed else reversed(tensor.shape))
    blocks, name = -(-rows // size), f"{value.name}{'_T' if transposed else ''}"
    is_short = is_table and _are_short(_blocks(_read(tensor, transposed), size))
    from_lowest = has_offsets and rows % size == 0 and _is_worth_lowest(_blocks(_read(tensor, transposed), size))
    unmap(tensor)
    kind = ir.DataType.FLOAT16 if is_short else tensor.dtype
    made = []
    held = [("Q8", [columns, blocks, size], ir.DataType.UINT8), ("scales", [columns, blocks], kind)]
    held += [("lowest", [columns, blocks], ir.DataType.FLOAT16)] * from_lowest
    parts_of = _parts_from_lowest if from_lowest else _parts
    for index, (suffix, shape, dtype) in enumerate(held):
        read = functools.partial(_part, tensor, transposed, size, kind.numpy(), parts_of, index)
        lazy = ir.LazyTensor(read, dtype=dtype, shape=ir.Shape(shape), name=f"{name}_{suffix}")
        made.append(new_value(graph, f"{name}_{suffix}", lazy))
    nbytes = sum(one.const_value.nbytes for one in made)
    parts = [made[0], cast_value(graph, made[1], tensor.dtype)]
    offsets = block_offsets(graph, made[2], made[1], _MIDDLE) if from_lowest else None
    return StoredMatrix(8, size, rows, columns, parts, nbytes, offsets, tensor.dtype.name == "FLOAT16")


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


def _is_worth_lowest(blocks: Floats) -> bool:
    """Whether steps from the lowest weight have less than a part of the error: that which more bits would leave."""
    if not blocks.size or float(blocks.min()) < -(2.0**15):  # float16 ends at twice that
        return False
    sample = blocks[:: -(-len(blocks) // _SAMPLE)].astype(numpy.float32)
    errors = []
    for numbers, scales, *low in (_parts(sample, numpy.float32), _parts_from_lowest(sample, numpy.float32)):
        steps = numbers.astype(numpy.float32) - (0 if low else _MIDDLE)
        found = steps * scales[..., None] + (low[0][..., None].astype(numpy.float32) if low else 0)
        errors.append(float(numpy.square(found - sample).sum(dtype=numpy.float64)))
    return bool(errors[1] * 4.0 ** (16 / blocks.shape[2]) < errors[0])


def _part(tensor: Any, transposed: bool, size: int, kind: Any, parts_of: Any, index: int) -> Any:
    """The integers of a matrix, its scales, or its lowest weights."""
    import onnx_ir as ir

    blocks = _blocks(_read(tensor, transposed), size).astype(numpy.float32)
    unmap(tensor)
    return ir.tensor(parts_of(blocks, kind)[index])


def _parts(blocks: Floats, kind: Any) -> tuple[Any, ...]:
    """Integers and scales, which are rounded to their type before the integers are."""
    scales = (numpy.abs(blocks).max(2) / _MOST).astype(kind)
    return _numbers(blocks, scales, -_MOST, _MOST, _MIDDLE), scales


def _parts_from_lowest(blocks: Floats, kind: Any) -> tuple[Any, ...]:
    """Integers, scales and lowest weights."""
    lowest = blocks.min(2).astype(numpy.float16)
    above = blocks - lowest[..., None].astype(numpy.float32)
    scales = (above.max(2) / _LEVELS).astype(kind)
    return _numbers(above, scales, 0, _LEVELS, 0), scales, lowest


def _numbers(blocks: Floats, scales: Floats, least: int, most: int, middle: int) -> npt.NDArray[numpy.uint8]:
    steps = scales[..., None].astype(numpy.float32)
    whole = numpy.rint(blocks / numpy.where(steps == 0, 1, steps)).clip(least, most)
    numbers: npt.NDArray[numpy.uint8] = (whole + middle).astype(numpy.uint8)
    return numbers
