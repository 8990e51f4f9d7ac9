"""Pass tensors of all types to onnxruntime and back: types that NumPy does not have are passed as bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from ..diagnose.compare import is_text
from ..errors import ReplayError
from ..messages import first_line
from .elements import ELEMENTS

__all__ = ["run_session", "to_onnxruntime"]

# what onnxruntime calls types of elements, where torch has another name
_TORCH_NAMES = {"float": "float32", "double": "float64", "string": "str"}


def to_onnxruntime(runtime: Any, name: str, kind: str, leaf: Any) -> Any:
    """Return an input as onnxruntime takes it.

    Args:
        runtime: the module ``onnxruntime``.
        name: of the input.
        kind: its type, as onnxruntime spells it: ``"tensor(float)"``.
        leaf: a tensor, an array, a number, a text.

    Raises:
        ReplayError: when it has elements of another type.
    """
    import numpy

    wanted = kind.removeprefix("tensor(").removesuffix(")")
    wanted = next((n for n in ELEMENTS if n.replace("_", "") == wanted), _TORCH_NAMES.get(wanted, wanted))
    if isinstance(leaf, (bool, int, float, str)):  # a number has no type of its own
        return numpy.array(leaf, object if wanted == "str" else wanted)
    tensor = leaf if isinstance(leaf, torch.Tensor) else None
    found = str(leaf.dtype).removeprefix("torch.") if tensor is not None else leaf.dtype.name
    if found != wanted and not (wanted == "str" and is_text(leaf)):
        raise ReplayError(f"The model takes {name} as {wanted}, and the case has it as {found}.")
    if tensor is None:
        return leaf.astype(object) if wanted == "str" else leaf
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    element = ELEMENTS.get(wanted)
    if element is None or not element.cast:
        return plain.numpy()
    bits = plain.view(torch.uint16 if plain.element_size() == 2 else torch.uint8).numpy()
    return runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, element.code)


def run_session(session: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Run the model; its outputs by name, as tensors, or as arrays of text.

    Raises:
        ReplayError: when onnxruntime raises.
    """
    import onnxruntime

    names = [node.name for node in session.get_outputs()]
    try:
        if any(map(is_text, feeds.values())):  # no OrtValue holds text
            return {name: _tensor(array) for name, array in zip(names, session.run(names, feeds), strict=True)}
        values = {
            name: value if isinstance(value, onnxruntime.OrtValue) else onnxruntime.OrtValue.ortvalue_from_numpy(value)
            for name, value in feeds.items()
        }
        found = session.run_with_ort_values(names, values)
        return {name: _from_onnxruntime(value) for name, value in zip(names, found, strict=True)}
    except Exception as error:  # onnxruntime has no base class for its errors
        raise ReplayError(f"onnxruntime fails on the inputs of the case: {first_line(error)}") from error


def _from_onnxruntime(value: Any) -> Any:
    name = next((n for n, e in ELEMENTS.items() if e.cast and e.packed == 1 and e.code == value.element_type()), None)
    if name is None:
        return _tensor(value.numpy())
    # NumPy has no such type, so the bytes are read where they are
    data = bytearray(ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()))
    return torch.frombuffer(data or bytearray(8), dtype=getattr(torch, name))[: len(data)].reshape(value.shape())


def _tensor(array: Any) -> Any:
    # onnxruntime's uint64 is a type of C of the same size, which torch does not take
    return array if is_text(array) else torch.tensor(array.view(array.dtype.str))
