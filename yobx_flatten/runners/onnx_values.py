"""Pass tensors of all types to onnxruntime and back; types unknown to NumPy as bytes."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from ..core.compare import is_text
from ..errors import ReplayError
from .elements import ELEMENTS

# what onnxruntime calls types of elements, where torch has another name
_TORCH_NAMES = {"float": "float32", "double": "float64", "string": "str"}
# what NumPy does not have, by its number in ONNX
_AS_BYTES = {element.code: name for name, element in ELEMENTS.items() if element.cast and element.packed == 1}


class ValueType(NamedTuple):
    """The type of the elements of an input or output."""

    name: str  # as torch and NumPy call it; `"str"` for text
    dtype: torch.dtype | None  # as torch has it; `None` for text and others that torch does not have
    code: int | None  # its number in ONNX, where NumPy does not have it; `None` where it does


def value_type(kind: str) -> ValueType:
    """Read the type of an input or output.

    >>> value_type("tensor(float)")
    ValueType(name='float32', dtype=torch.float32, code=None)
    >>> value_type("tensor(bfloat16)").code, value_type("tensor(string)").dtype
    (16, None)
    """
    found = kind.removeprefix("tensor(").removesuffix(")")
    name = next((n for n in ELEMENTS if n.replace("_", "") == found), _TORCH_NAMES.get(found, found))
    dtype = getattr(torch, name, None)
    element = ELEMENTS.get(name)
    code = element.code if element is not None and element.cast else None
    return ValueType(name, dtype if isinstance(dtype, torch.dtype) else None, code)


def to_value(name: str, kind: ValueType, leaf: Any) -> Any:
    """Return an input as onnxruntime takes it."""
    # returns: an `onnxruntime.OrtValue`, which shares the memory of `leaf` where it can; an array of text for text
    from onnxruntime import OrtValue

    if isinstance(leaf, torch.Tensor):
        if leaf.dtype != kind.dtype:
            found = str(leaf.dtype).removeprefix("torch.")
            raise ReplayError(f"The model takes {name} as {kind.name}, and the case has it as {found}.")
        plain = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if kind.code is None:
            return OrtValue.ortvalue_from_numpy(plain.numpy())
        bits = plain.view(torch.uint16 if plain.element_size() == 2 else torch.uint8).numpy()
        return OrtValue.ortvalue_from_numpy_with_onnx_type(bits, kind.code)
    import numpy

    text = kind.name == "str"
    if isinstance(leaf, (bool, int, float, str)):  # a number has no type of its own
        array = numpy.array(leaf, object if text else kind.name)
    elif leaf.dtype.name == kind.name or (text and is_text(leaf)):
        array = leaf.astype(object) if text else leaf
    else:
        raise ReplayError(f"The model takes {name} as {kind.name}, and the case has it as {leaf.dtype.name}.")
    return array if text else OrtValue.ortvalue_from_numpy(array)  # no OrtValue holds text


def from_value(value: Any) -> Any:
    """Return an output of onnxruntime."""
    # value: an `onnxruntime.OrtValue`, or an array
    name = _AS_BYTES.get(value.element_type()) if hasattr(value, "element_type") else None
    if name is None:
        array = value.numpy() if hasattr(value, "numpy") else value
        # onnxruntime's uint64 is a type of C of the same size, which torch does not take
        return array if is_text(array) else torch.from_numpy(array.view(array.dtype.str))
    # NumPy has no such type, so the bytes are read where they are
    data = bytearray(ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()))
    return torch.frombuffer(data or bytearray(8), dtype=getattr(torch, name))[: len(data)].reshape(value.shape())
