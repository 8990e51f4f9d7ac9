"""Store nested values in a file and read them back, in one call each."""

from __future__ import annotations

import os
import typing
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ..errors import DamagedFileError, InvalidArgumentError, describe_class
from ..files.damage import damage_as
from ..recipe.aliases import Device, PyTree
from .onnx_read import Initializers, open_model, structure_of
from .onnx_write import save
from .structure import flatten_tree, unflatten_tree

if TYPE_CHECKING:
    import onnx

T = TypeVar("T")


def save_nested(path: str | os.PathLike[str], values: PyTree, *, external_data: bool | None = None) -> int:
    """Store nested values in an ONNX file, with their structure, static data and types.

    onnxruntime and ``onnx.reference`` can run the file, and return every tensor under a readable name; nothing is
    pickled. Tensors are written one after the other, from where they are; in addition to the values, memory is needed
    for one tensor that is not contiguous, or not on the host.

    Args:
        path: the file to write; its folder is created if it does not exist. The file appears when it is complete.
        values: registered classes and containers of tensors of any type, NumPy arrays, numbers, text, bytes, ``None``,
            enums and dtypes. Values, shapes and types are kept; devices, strides and ``requires_grad`` are not. One
            tensor in two places is stored once.
        external_data: whether tensors are stored in a second file, ``<path>.data``; ``None``, the default, does so for
            more than 16 MiB of tensors. One file alone cannot have more than 2 GB.

    Returns:
        The number of bytes written.

    Raises:
        NotRegisteredError: when there is an object of a class that is not registered.
        InvalidArgumentError: when a tensor has no plain data (sparse, nested, on the meta device, quantized), is of a
            subclass of its own, or when an object holds itself. The message has the line to type for each.
        StaticDataError: when static data, or a leaf, is something that cannot be stored.
        MissingDependencyError: when onnx is not installed.

    >>> import tempfile
    >>> import torch
    >>> values = {"x": torch.ones(2, dtype=torch.bfloat16), "scale": 0.5, "extra": [None]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     nbytes = save_nested(f"{folder}/inputs.onnx", values)
    ...     load_nested(f"{folder}/inputs.onnx")
    {'x': tensor([1., 1.], dtype=torch.bfloat16), 'scale': 0.5, 'extra': [None]}
    """
    return save(path, flatten_tree(values), function="save_nested", external_data=external_data)


@overload
def load_nested(path: str | os.PathLike[str], *, device: Device = "cpu") -> object: ...


@overload
def load_nested(path: str | os.PathLike[str], *, device: Device = "cpu", expected: type[T]) -> T: ...


def load_nested(path: str | os.PathLike[str], *, device: Device = "cpu", expected: type[Any] | None = None) -> Any:
    """Read what :func:`save_nested` stored.

    Classes must be registered, and their modules imported, before: a file does not choose what is imported, except for
    modules of torch, NumPy, transformers and diffusers. onnxruntime is not needed.

    Args:
        path: the file. A second file that belongs to it must be next to it.
        device: device of the tensors; ``"cpu"`` by default.
        expected: class of the whole value, ``dict`` or ``dict[str, torch.Tensor]`` for example: another value is
            refused, and a type checker knows the result. Items are not checked. ``None``, the default, takes any value.

    Returns:
        The values, bitwise identical to those that were stored.

    Raises:
        InvalidArgumentError: when the value is not of the class that ``expected`` names.
        NotRegisteredError: when a class is not registered.
        ForeignFileError: when another program wrote the file, or a newer version of this package.
        DamagedFileError: when it is truncated, or its contents do not fit together.
        MissingDependencyError: when onnx is not installed.

    >>> import tempfile
    >>> import torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     nbytes = save_nested(f"{folder}/inputs.onnx", {"ids": torch.arange(3), "names": ["a", None]})
    ...     load_nested(f"{folder}/inputs.onnx")
    {'ids': tensor([0, 1, 2]), 'names': ['a', None]}
    """
    found = read(path, "load_nested", device=device, content="values")
    if expected is None or isinstance(found, typing.get_origin(expected) or expected):
        return found
    name = type(found).__name__
    raise InvalidArgumentError(
        f"load_nested: {os.fspath(path)} holds a {describe_class(type(found))}, and not what expected= names. Name its "
        f"class:\n    load_nested({os.fspath(path)!r}, expected={name})"
    )


def read(
    given: str | os.PathLike[str] | onnx.ModelProto, function: str, *, device: Device, content: str | None
) -> PyTree:
    """Read a file, or a model in memory, from its initializers."""
    # content: what it should hold; `None` for whatever it is
    model, folder = open_model(given, function)
    name = "The model" if folder is None else os.fspath(given)
    structure = structure_of(model, name, content)
    with damage_as(DamagedFileError, name):
        return unflatten_tree(structure, Initializers(model, folder, name), device)
