"""Write nested values to an ONNX file, and read nested values from an ONNX file."""

from __future__ import annotations

import json
import math
import os
import pathlib
import typing
import zlib
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ..core.files.document import damage_as, open_regular, read_bytes
from ..errors import DamagedFileError, ForeignFileError, InvalidArgumentError, describe_class
from ..registry.recipe.aliases import Device, PyTree
from ..runners.ports import Element, require_onnx
from .onnx_write import CHECKSUM, CONTENT, FORMAT, STRUCTURE, VERSION, crc_of_strings, save
from .structure import flatten_tree, unflatten_tree

if TYPE_CHECKING:
    import onnx

T = TypeVar("T")


def save_nested(path: str | os.PathLike[str], values: PyTree, *, external_data: bool | None = None) -> int:
    """Store a nested object in an ONNX file, with its structure, static data and types.

    onnxruntime and ``onnx.reference`` can run the file, and return every tensor under a readable name; nothing is
    pickled. Tensors are written one at a time; only a tensor that is not contiguous, or not in host memory, is copied.

    Args:
        path: the file to write, which appears only when it is complete; its folder is created if it does not exist.
        values: registered classes and containers of tensors of any type, NumPy arrays, numbers, text, bytes, ``None``,
            enums and dtypes. Values, shapes and types are stored; devices, strides and ``requires_grad`` are not. A
            tensor that occurs several times is stored once.
        external_data: whether tensors are stored in a second file, ``<path>.data``; ``None``, the default, means
            ``True`` for more than 16 MiB of tensors. A file without external data is limited to 2 GB.

    Returns:
        The number of bytes written.

    Raises:
        NotRegisteredError: when ``values`` contains an object of a class that is not registered.
        InvalidArgumentError: when a tensor has no plain data (sparse, nested, on the meta device, quantized), is of a
            tensor subclass, or when an object contains itself. For a refused tensor, the error shows how to convert it.
        StaticDataError: when static data or a leaf is of a type that cannot be stored.
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
    """Read a nested object that :func:`save_nested` stored.

    The classes in the file must be registered and their modules imported before the call; only modules of torch, NumPy,
    transformers and diffusers are imported automatically. onnxruntime is not needed.

    Args:
        path: the file. The file of external data, ``<path>.data``, must be in the same folder if it exists.
        device: device of the tensors; ``"cpu"`` by default.
        expected: class that the returned object must have, such as ``dict`` or ``dict[str, torch.Tensor]``, whose item
            types are not checked. ``expected=None``, the default, accepts any object.

    Returns:
        The nested object, bitwise identical to the stored object.

    Raises:
        InvalidArgumentError: when the value is not of the class that ``expected`` names.
        NotRegisteredError: when a class in the file is not registered.
        ForeignFileError: when another program or a newer version of this package wrote the file.
        DamagedFileError: when the file is truncated, or its contents are inconsistent.
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
        f"load_nested: {os.fspath(path)} contains a {describe_class(type(found))}, not the class in expected=. Pass "
        f"the class of the value:\n    load_nested({os.fspath(path)!r}, expected={name})"
    )


def read(
    given: str | os.PathLike[str] | onnx.ModelProto, function: str, *, device: Device, content: str | None
) -> PyTree:
    # content: the expected kind of content; `None` for any
    model, folder = open_model(given, function)
    name = "The model" if folder is None else os.fspath(given)
    structure = structure_of(model, name, content)
    with damage_as(DamagedFileError, name):
        return unflatten_tree(structure, Initializers(model, folder, name), device)


_PIECE = 16 * 2**20  # bytes read at once
_LARGEST = 2**31  # bytes; protobuf reads no more
_KNOWN_VERSION = 1


def open_model(given: object, function: str) -> tuple[Any, pathlib.Path | None]:
    """Load an ONNX file without its external data, or return the given model if it is already in memory."""
    onnx = require_onnx(function)
    from google.protobuf.message import DecodeError  # a dependency of onnx

    if isinstance(given, onnx.ModelProto):
        return given, None
    if not isinstance(given, (str, os.PathLike)):
        raise InvalidArgumentError(f"{function} takes a path or an onnx.ModelProto, found {describe_class(given)}.")
    path = pathlib.Path(given)
    data = read_bytes(path, failure=DamagedFileError, most=_LARGEST)
    if not data:
        raise DamagedFileError(f"{path} is empty.")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise DamagedFileError(f"{path} is not an ONNX file, or it is truncated ({error}).") from error
    return model, path.parent


def structure_of(model: onnx.ModelProto, name: str, content: str | None = None) -> Any:
    """Return the structure of the nested values in an ONNX model, read from its metadata; refuse other ONNX models."""
    # content: the expected kind of content; `None` for any
    # protobuf returns bytes for invalid text
    found = {entry.key: entry.value for entry in model.metadata_props if isinstance(entry.value, str)}
    if found.get(FORMAT) != "nested-values":
        raise ForeignFileError(
            f"{name} contains no nested values: its metadata has no key {FORMAT!r}. The file may be a model, or from "
            "another program. Files of nested values are written by save_nested and save_case."
        )
    if not found.get(VERSION, "").isdigit() or int(found[VERSION]) > _KNOWN_VERSION:
        raise ForeignFileError(
            f"{name} is of version {found.get(VERSION)!r} of the format, but yobx_flatten here reads version "
            f"{_KNOWN_VERSION}. Update the package:\n    pip install --upgrade yobx-flatten"
        )
    if content is not None and found.get(CONTENT) != content:
        function = {"case": "load_case", "values": "load_nested"}.get(found.get(CONTENT, ""), "load_nested")
        raise ForeignFileError(f"{name} holds {found.get(CONTENT)!r}, not {content!r}. Read it with {function}.")
    text = found.get(STRUCTURE, "")
    if str(zlib.crc32(text.encode())) != found.get(CHECKSUM):
        raise DamagedFileError(f"{name} is damaged: the checksum of its structure is wrong.")
    try:
        return json.loads(text)  # the content is checked when it is read
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{name} is damaged: its structure is not JSON ({error}).") from error


class Initializers:
    """Reads stored values from the initializers of an ONNX model, one at a time (see :class:`.structure.Source`)."""

    # folder: the folder of the external data; `None` for a model in memory
    def __init__(self, model: onnx.ModelProto, folder: pathlib.Path | None, name: str) -> None:
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._folder, self._name = folder, name
        self._sizes: dict[str, int] = {}

    def check(self, record: dict[str, Any], element: Element, dims: tuple[int, ...], nbytes: int) -> None:
        tensor = self._tensor(record)
        if tensor.data_type != element.code or tuple(tensor.dims) != dims or min(dims, default=0) < 0:
            raise self._damaged(record, "has a different type or shape than its metadata")
        if element.code == 8:  # strings
            if len(tensor.string_data) != math.prod(dims):
                raise self._damaged(record, f"has {len(tensor.string_data)} elements")
        elif tensor.HasField("data_location") and tensor.data_location == 1:
            path, start, length = self._place(record, tensor)
            if length != nbytes:
                raise self._damaged(record, f"has {length} bytes instead of {nbytes}")
            if path.name not in self._sizes:
                if not path.is_file():
                    problem = f"is stored in {path.name}, which is not there; keep the two files together"
                    raise self._damaged(record, problem)
                self._sizes[path.name] = path.stat().st_size
            size = self._sizes[path.name]
            if start + length > size:
                raise self._damaged(record, f"ends at byte {start + length} of {path.name}, which has {size}")
        elif len(tensor.raw_data) != nbytes:
            raise self._damaged(record, f"has {len(tensor.raw_data)} bytes instead of {nbytes}")

    def fill(self, record: dict[str, Any], element: Element, view: memoryview) -> None:
        tensor = self._tensor(record)
        if tensor.HasField("data_location") and tensor.data_location == 1:
            path, start, _ = self._place(record, tensor)
            with open_regular(path, failure=DamagedFileError) as file:
                file.seek(start)
                checksum = 0
                for begin in range(0, len(view), _PIECE):
                    piece = view[begin : begin + _PIECE]
                    file.readinto(piece)
                    checksum = zlib.crc32(piece, checksum)
        else:
            view[:] = tensor.raw_data
            checksum = zlib.crc32(view)
        if checksum != record["crc32"]:
            raise self._damaged(record, "has a wrong checksum")

    def strings(self, record: dict[str, Any]) -> list[bytes]:
        found = list(self._tensor(record).string_data)
        if crc_of_strings(found) != record["crc32"]:
            raise self._damaged(record, "has a wrong checksum")
        return found

    def _tensor(self, record: dict[str, Any]) -> onnx.TensorProto:
        tensor = self._tensors.get(record.get("stored", record["name"]))
        if tensor is None:
            raise self._damaged(record, "is missing")
        return tensor

    def _place(self, record: dict[str, Any], tensor: onnx.TensorProto) -> tuple[pathlib.Path, int, int]:
        """Return the file that holds the data of a tensor, and the offset and length of the data in bytes."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        # a file may only refer to files in its own folder
        if not location or pathlib.PurePath(location).name != location or location == "..":
            raise self._damaged(record, f"is stored in {location!r}, which is not a file in the ONNX file's folder")
        if self._folder is None:
            raise InvalidArgumentError(
                f"{self._name} stores {record['name']!r} in the file {location!r}, which cannot be found for a model "
                "in memory. Pass the path of the model."
            )
        start, length = int(entries.get("offset", 0)), int(entries.get("length", -1))
        if start < 0 or length < 0:
            raise self._damaged(record, "has no valid offset in its data file")
        return self._folder / location, start, length

    def _damaged(self, record: dict[str, Any], problem: str) -> DamagedFileError:
        return DamagedFileError(f"{self._name} is damaged: {record['name']!r} {problem}.")
