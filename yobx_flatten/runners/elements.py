"""Map element types between torch, NumPy and ONNX.

A file must run in onnxruntime and in ``onnx.reference``, and what Python gets from a run are NumPy arrays. So

- complex numbers, which onnxruntime refuses to load, are stored as pairs of real numbers, in one more axis of size 2;
- bfloat16 and the 8-bit floats, which NumPy does not have, are stored as they are, and the graph casts them to float32,
  which holds every value of theirs;
- ``float4_e2m1fn_x2``, two numbers in a byte, is stored as bytes;
- the types of two and four bits that ml_dtypes adds to NumPy, one number in a byte, are stored as ONNX has them, four
  or two in a byte, and cast like the floats. onnxruntime (1.31) has no kernel that casts ``float4_e2m1fn``.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from ..errors import FlattenError
from ..errors.dependencies import require


class Element(NamedTuple):
    """How one type of elements is stored."""

    code: int  # the type of the initializer, a value of `onnx.TensorProto.DataType`
    pair: bool = False  # whether each element is stored as two numbers, in its own axis after the others
    cast: bool = False  # whether the graph returns float32 in its place
    opset: int = 18  # the first version of ONNX's operators whose `Cast` knows the type
    packed: int = 1  # how many numbers are stored in a byte; arrays of NumPy have each in its own byte then

    def nbytes(self, count: int, itemsize: int) -> int:
        """The size of a number of elements."""
        return count * itemsize if self.packed == 1 else -(-count // self.packed)


UINT8, INT64, STRING, BOOL, DOUBLE = Element(2), Element(7), Element(8), Element(9), Element(11)

ELEMENTS: dict[str, Element] = {
    "float32": Element(1),
    "uint8": UINT8,
    "int8": Element(3),
    "uint16": Element(4),
    "int16": Element(5),
    "int32": Element(6),
    "int64": INT64,
    "bool": BOOL,
    "float16": Element(10),
    "float64": DOUBLE,
    "uint32": Element(12),
    "uint64": Element(13),
    "complex32": Element(10, pair=True),
    "complex64": Element(1, pair=True),
    "complex128": Element(11, pair=True),
    "bfloat16": Element(16, cast=True),
    "float8_e4m3fn": Element(17, cast=True, opset=19),
    "float8_e4m3fnuz": Element(18, cast=True, opset=19),
    "float8_e5m2": Element(19, cast=True, opset=19),
    "float8_e5m2fnuz": Element(20, cast=True, opset=19),
    "float8_e8m0fnu": Element(24, cast=True, opset=24),
    "float4_e2m1fn_x2": UINT8,
    "uint4": Element(21, cast=True, opset=21, packed=2),
    "int4": Element(22, cast=True, opset=21, packed=2),
    "float4_e2m1fn": Element(23, cast=True, opset=23, packed=2),
    "uint2": Element(25, cast=True, opset=25, packed=4),
    "int2": Element(26, cast=True, opset=25, packed=4),
}


def pack(codes: Any, packed: int) -> Any:
    """Pack several numbers into a byte, the first in the lowest bits, as ONNX does.

    >>> import numpy
    >>> pack(numpy.array([1, 2, 15], numpy.uint8), 2).tolist()
    [33, 15]
    """
    # codes: a flat array of bytes, one number in each
    import numpy

    bits = 8 // packed
    padded = numpy.zeros((-(-codes.size // packed), packed), numpy.uint8)
    padded.reshape(-1)[: codes.size] = codes & (2**bits - 1)
    return numpy.bitwise_or.reduce(padded << numpy.arange(0, 8, bits, dtype=numpy.uint8), axis=1, dtype=numpy.uint8)


def unpack(data: Any, packed: int, count: int) -> Any:
    """Undo :func:`pack`: return a flat array of ``count`` bytes."""
    import numpy

    bits = 8 // packed
    codes = (data[:, None] >> numpy.arange(0, 8, bits, dtype=numpy.uint8)) & numpy.uint8(2**bits - 1)
    return codes.reshape(-1)[:count]


def require_onnx(function: str) -> Any:
    """Import onnx, or raise with the line that installs it."""
    require("onnx", purpose=function, extra="onnx")
    import onnx

    if sys.byteorder != "little":  # ONNX stores the low byte first, and here bytes are stored as they are in memory
        raise FlattenError(f"{function} works on machines that store the low byte first; this one does not.")
    return onnx
