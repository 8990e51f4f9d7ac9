"""Values to store, and a comparison that sees every bit."""

import collections
import enum
import math
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.utils._pytree as pytree

from yobx_flatten import pytree_dataclass

Pair = collections.namedtuple("Pair", ["left", "right"])


class Mode(enum.Enum):
    TRAIN = "train"
    EVAL = "eval"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@pytree_dataclass(backends=("torch",))
@dataclass
class State:
    hidden: Any
    extra: Any
    mode: Any = field(default=Mode.TRAIN, metadata={"static": True})


TORCH_TYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]  # fmt: skip


def random_tensor(dtype, shape, seed=0):
    """Random bits of any type: NaNs with all their payloads, infinities, denormals."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.bool)
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def bits(leaf):
    """Everything that makes a leaf what it is; NaN equals the same NaN, and -0.0 is not 0.0."""
    if isinstance(leaf, torch.Tensor):
        data = leaf.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        return type(leaf), leaf.dtype, tuple(leaf.shape), data
    if isinstance(leaf, (numpy.ndarray, numpy.generic)):
        array = numpy.asarray(leaf)
        content = array.tolist() if array.dtype.hasobject else array.tobytes()
        return type(leaf), array.dtype, array.dtype.byteorder, array.shape, content
    if isinstance(leaf, complex):
        return complex, struct.pack("dd", leaf.real, leaf.imag)
    return (float, struct.pack("d", leaf)) if isinstance(leaf, float) else (type(leaf), leaf)


def same(left, right):
    left_leaves, left_spec = pytree.tree_flatten(left)
    right_leaves, right_spec = pytree.tree_flatten(right)
    return left_spec == right_spec and list(map(bits, left_leaves)) == list(map(bits, right_leaves))
