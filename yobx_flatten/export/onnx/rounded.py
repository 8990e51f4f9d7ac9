"""Round matrices to 8 bits: whole steps from -127 to 127 of a scale for each block, and no zero points.

.. code-block:: text

    weights near 16 steps, as those trained on from 4 bits     l     l + t     l + 2t    ...   l + 15t
    steps of t/17, t/16, ... or t/9: of which one is nearest   |||||||||||||||||||||||||||||||||||||||
    to a part of l; that of 0 is the zero point                   0

Such weights get a zero point for each block, where that is worth its bits. A lowest weight in full precision would be
exact, and costs a product of all lowest weights with sums of the inputs: 6 % of the time of a token.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy

from .kept_integers import cast_value
from .stored_matrix import StoredMatrix, new_value
from .weight_grid import Floats
from .weights import unmap

__all__ = ["round_table", "round_to_8_bits"]

_MOST = 127
_MIDDLE = 128

_STEPS = 15
"""Steps between the lowest and the largest of a block that was in 4 bits."""

_FINER = range(17, 8, -1)
"""Into how many steps each of them is parted: 255 of 8 bits are 17 times as many."""

_SAMPLE = 64
"""Outputs whose weights decide from where the steps count."""

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
    has_zeros = not is_table and _are_worth_zeros(_blocks(_read(tensor, transposed), size))
    unmap(tensor)
    kind = ir.DataType.FLOAT16 if is_short else tensor.dtype
    made = []
    held = [("Q8", [columns, blocks, size], ir.DataType.UINT8), ("scales", [columns, blocks], kind)]
    held += [("zero_points", [columns, blocks], ir.DataType.UINT8)] * has_zeros
    parts_of = _parts_with_zeros if has_zeros else _parts
    for index, (suffix, shape, dtype) in enumerate(held):
        read = functools.partial(_part, tensor, transposed, size, kind.numpy(), parts_of, index)
        lazy = ir.LazyTensor(read, dtype=dtype, shape=ir.Shape(shape), name=f"{name}_{suffix}")
        made.append(new_value(graph, f"{name}_{suffix}", lazy))
    nbytes = sum(one.const_value.nbytes for one in made)
    parts = [made[0], cast_value(graph, made[1], tensor.dtype), *made[2:]]
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


def _are_worth_zeros(blocks: Floats) -> bool:
    """Whether zero points leave less than a part of the error: that which as many more bits would leave."""
    if not blocks.size:
        return False
    sample = blocks[:: -(-len(blocks) // _SAMPLE)].astype(numpy.float32)
    errors = []
    for numbers, scales, *zeros in (_parts(sample, numpy.float32), _parts_with_zeros(sample, numpy.float32)):
        steps = numbers.astype(numpy.float32) - (zeros[0][..., None] if zeros else _MIDDLE)
        errors.append(float(numpy.square(steps * scales[..., None] - sample).sum(dtype=numpy.float64)))
    return bool(errors[1] * 4.0 ** (8 / blocks.shape[2]) < errors[0])


def _part(tensor: Any, transposed: bool, size: int, kind: Any, parts_of: Any, index: int) -> Any:
    """The integers of a matrix, its scales, or its zero points."""
    import onnx_ir as ir

    blocks = _blocks(_read(tensor, transposed), size).astype(numpy.float32)
    unmap(tensor)
    return ir.tensor(parts_of(blocks, kind)[index])


def _parts(blocks: Floats, kind: Any) -> tuple[Any, ...]:
    """Integers and scales, which are rounded to their type before the integers are."""
    scales = (numpy.abs(blocks).max(2) / _MOST).astype(kind)
    steps = _divisors(scales)
    whole = numpy.rint(blocks / steps).clip(-_MOST, _MOST)
    return (whole + _MIDDLE).astype(numpy.uint8), scales


def _parts_with_zeros(blocks: Floats, kind: Any) -> tuple[Any, ...]:
    """Integers, scales and zero points: of the scales the one of which the lowest weight is nearest to whole steps."""
    low, high = numpy.minimum(blocks.min(2), 0), numpy.maximum(blocks.max(2), 0)
    scales, least = numpy.zeros(low.shape, kind), numpy.full(low.shape, numpy.inf, numpy.float32)
    for finer in _FINER:
        tried = ((high - low) / (_STEPS * finer)).astype(kind)
        steps = _divisors(tried)[..., 0]
        apart = numpy.abs(low - numpy.rint(low / steps) * steps)
        scales, least = numpy.where(apart < least, tried, scales), numpy.minimum(apart, least)
    steps = _divisors(scales)
    zeros = numpy.rint(-low / steps[..., 0]).clip(0, 255).astype(numpy.uint8)
    whole = numpy.rint(blocks / steps) + zeros[..., None]
    return whole.clip(0, 255).astype(numpy.uint8), scales, zeros


def _divisors(scales: Floats) -> Floats:
    """Scales in float32, to divide blocks by; 1 for blocks of zeros."""
    wide: Floats = scales[..., None].astype(numpy.float32)
    return numpy.where(wide == 0, numpy.float32(1), wide)
