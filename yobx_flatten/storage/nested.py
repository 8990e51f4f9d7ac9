"""Write nested values to an ONNX file, as initializers of a graph with as few nodes as possible, and read them."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import pathlib
import typing
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, overload

from ..core.files.document import damage_as, data_files_of, open_regular, read_bytes
from ..core.files.scratch import data_path, publish_files, scratch_for
from ..errors import DamagedFileError, ForeignFileError, InvalidArgumentError, describe_class
from ..registry.recipe.aliases import Device, PyTree
from ..runners.ports import UINT8, Element, require_onnx
from .structure import Payload, Structure, flatten_tree, unflatten_tree, unique

if TYPE_CHECKING:
    import onnx

T = TypeVar("T")

FORMAT, VERSION, CONTENT = "yobx_flatten.format", "yobx_flatten.format_version", "yobx_flatten.content"
STRUCTURE, CHECKSUM = "yobx_flatten.structure", "yobx_flatten.structure_crc32"

_FLOAT = 1
_INLINE = 1024  # bytes; smaller tensors are stored in the model file
_TOGETHER = 16 * 2**20  # bytes; up to this size, all tensors are stored in the model file
_PROTOBUF = 2**31  # bytes; protobuf reads no more
_LARGEST = _PROTOBUF - 2**26  # bytes; minus room for names and shapes
_ALIGNED = 64  # bytes
_PIECE = 16 * 2**20  # bytes written or read at once
_KNOWN_VERSION = 1


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
        InvalidArgumentError: when an object contains itself, or a tensor cannot be stored because it is sparse, nested,
            quantized, on the meta device or of a tensor subclass. For such a tensor, the error shows how to convert it.
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
        expected: class that the returned object must have, such as ``dict`` or ``dict[str, torch.Tensor]``. The types
            of the items in a container are not checked. ``expected=None``, the default, accepts any object.

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
        f"load_nested: {os.fspath(path)} contains a {describe_class(type(found))}, but expected= is another "
        f"class. Pass the class of the value:\n    load_nested({os.fspath(path)!r}, expected={name})"
    )


class OnnxWriter:
    # opset: the version of ONNX's operators; an element type can require a newer version
    # external: file for the data, `None` to store it in the model
    def __init__(
        self,
        function: str,
        *,
        opset: int = 18,
        ir_version: int = 10,
        external: BinaryIO | None = None,
        location: str = "",
    ) -> None:
        self._onnx = require_onnx(function)
        self._opset, self._ir_version = opset, ir_version
        self._external, self._location = external, location
        self._taken: set[str] = set()
        self._payloads: dict[str, Payload] = {}
        self._initializers: list[Any] = []
        self._nodes: list[Any] = []
        self._outputs: list[Any] = []

    def add_structure(self, structure: Structure) -> None:
        self._taken |= {payload.record["name"] for payload in structure.payloads}
        self._taken |= {record["name"] for record in structure.again}
        for payload in structure.payloads:
            self.add(payload)
        for record in structure.again:
            first = self._payloads[record["as"]]
            self.add_node("Identity", [record["as"]], record["name"])
            self.add_output(record["name"], _FLOAT if first.element.cast else first.element.code, first.dims)

    def add(self, payload: Payload, *, output: bool = True) -> None:
        """Add a value to the ONNX graph: an initializer, or a ``RandomUniform`` node if only a seed is stored."""
        # output: whether the graph returns the leaf; `True` by default
        name, element = payload.record["name"], payload.element
        self._payloads[name] = payload
        self._taken.add(name)
        code = _FLOAT if element.cast else element.code
        if "seed" in payload.record:
            seed = float(payload.record["seed"])
            self.add_node("RandomUniform", [], name, dtype=code, shape=list(payload.dims), seed=seed)
        elif element.cast:
            self._opset = max(self._opset, element.opset)
            stored = payload.record["stored"] = unique(f"{name}.stored", self._taken)
            self._initializers.append(self._tensor(payload, stored))
            self.add_node("Cast", [stored], name, to=_FLOAT)
        else:
            self._initializers.append(self._tensor(payload, name))
        if output:
            self.add_output(name, code, payload.dims)

    def add_sequence(self, name: str, payloads: Sequence[Payload]) -> None:
        for payload in payloads:
            if payload.record["name"] not in self._payloads:
                self.add(payload, output=False)
        name = unique(name, self._taken)
        self.add_node("SequenceConstruct", [payload.record["name"] for payload in payloads], name)
        first = payloads[0].element
        self.add_output(name, _FLOAT if first.cast else first.code, None, sequence=True)

    def add_node(self, operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> None:
        self._nodes.append(self._onnx.helper.make_node(operator, list(inputs), [output], **attributes))

    def add_output(self, name: str, code: int, dims: Sequence[int] | None, *, sequence: bool = False) -> None:
        # code: the type of the elements, a value of `onnx.TensorProto.DataType`
        # sequence: whether the value is a sequence of tensors; `False` by default
        helper = self._onnx.helper
        make = helper.make_tensor_sequence_value_info if sequence else helper.make_tensor_value_info
        self._outputs.append(make(name, code, dims))

    def model(self, json_: dict[str, Any] | None, content: str) -> onnx.ModelProto:
        # json_: the structure, for the metadata; `None` without one
        if not self._outputs:  # onnxruntime loads no graph without outputs
            self.add(Payload({"name": unique("nothing", self._taken)}, UINT8, (0,)))
        helper = self._onnx.helper
        graph = helper.make_graph(self._nodes, "values", [], self._outputs, self._initializers)
        opset = helper.make_opsetid("", self._opset)
        ir_version = max(self._ir_version, 13 if self._opset > 24 else 11 if self._opset > 23 else 0)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=ir_version, producer_name="yobx_flatten")
        text = json.dumps(json_, separators=(",", ":"))
        entries = {FORMAT: "nested-values", VERSION: "1", CONTENT: content, STRUCTURE: text}
        helper.set_model_props(model, {**entries, CHECKSUM: str(zlib.crc32(text.encode()))})
        return model

    def _tensor(self, payload: Payload, name: str) -> onnx.TensorProto:
        tensor = self._onnx.TensorProto()
        tensor.name, tensor.data_type = name, payload.element.code
        tensor.dims.extend(payload.dims)
        if payload.strings is not None:
            tensor.string_data.extend(payload.strings)
            payload.record["crc32"] = crc_of_strings(payload.strings)
            return tensor
        data = payload.data()
        payload.record["crc32"] = zlib.crc32(data)
        if self._external is None or payload.nbytes < _INLINE:
            tensor.raw_data = bytes(data)
            return tensor
        start = -(-self._external.tell() // _ALIGNED) * _ALIGNED
        self._external.write(bytes(start - self._external.tell()))
        for piece in range(0, payload.nbytes, _PIECE):
            self._external.write(data[piece : piece + _PIECE])
        tensor.data_location = self._onnx.TensorProto.EXTERNAL
        for key, value in (("location", self._location), ("offset", start), ("length", payload.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor


def crc_of_strings(strings: Sequence[bytes]) -> int:
    return functools.reduce(lambda checksum, text: zlib.crc32(text + b"\0", checksum), strings, 0)


def save(
    path: str | os.PathLike[str],
    structure: Structure,
    *,
    function: str,
    content: str = "values",
    external_data: bool | None = None,
) -> int:
    """Write a flattened object to an ONNX file; large tensors are written to a second file in the same folder."""
    # path: the file; the second file is `<path>.data`, or `<path>.1f0e3dad.data` if `path` or `<path>.data` exists
    # external_data: whether to use a second file; `None` to decide by size
    path = pathlib.Path(path)
    total = sum(payload.nbytes for payload in structure.payloads)
    if external_data is None:
        external_data = total > _TOGETHER
    if not external_data:
        check_size(total, function, "Remove external_data=False")
    require_onnx(function)
    with scratch_for(path) as folder:
        written, data = folder / path.name, data_path(folder / path.name, path)
        with contextlib.ExitStack() as stack:
            external = stack.enter_context(open(data, "wb")) if external_data else None
            writer = OnnxWriter(function, external=external, location=data.name)
            writer.add_structure(structure)
            with open(written, "wb") as file:
                file.write(writer.model(structure.json, content).SerializeToString())
        size = sum(file.stat().st_size for file in folder.iterdir())
        publish_files(folder, path, data_files_of(path) - {data.name})
    return size


def check_size(nbytes: int, function: str, remedy: str) -> None:
    if nbytes > _LARGEST:
        raise InvalidArgumentError(f"{function}: {nbytes / 1e9:.1f} GB exceed the 2 GB limit of ONNX files. {remedy}.")


def read(
    given: str | os.PathLike[str] | onnx.ModelProto, function: str, *, device: Device, content: str | None
) -> PyTree:
    # content: the expected kind of content; `None` for any
    model, folder = open_model(given, function)
    name = "The model" if folder is None else os.fspath(given)
    structure = structure_of(model, name, content)
    with damage_as(DamagedFileError, name):
        return unflatten_tree(structure, Initializers(model, folder, name), device)


def open_model(given: object, function: str) -> tuple[Any, pathlib.Path | None]:
    """Load an ONNX file without its external data, or return the given model if it is already in memory."""
    onnx = require_onnx(function)
    from google.protobuf.message import DecodeError  # a dependency of onnx

    if isinstance(given, onnx.ModelProto):
        return given, None
    if not isinstance(given, (str, os.PathLike)):
        raise InvalidArgumentError(f"{function} takes a path or an onnx.ModelProto, found {describe_class(given)}.")
    path = pathlib.Path(given)
    data = read_bytes(path, failure=DamagedFileError, most=_PROTOBUF)
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
            f"{name} has version {found.get(VERSION)!r} of the format, but the installed yobx_flatten reads version "
            f"{_KNOWN_VERSION}. Update the package:\n    pip install --upgrade yobx-flatten"
        )
    if content is not None and found.get(CONTENT) != content:
        function = {"case": "load_case", "values": "load_nested"}.get(found.get(CONTENT, ""), "load_nested")
        raise ForeignFileError(f"{name} is of type {found.get(CONTENT)!r}, not {content!r}. Read it with {function}.")
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
