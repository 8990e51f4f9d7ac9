"""Write stored values as initializers of an ONNX graph with as few nodes as possible."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from ..core.files.document import data_files_of
from ..core.files.scratch import data_path, publish_files, scratch_for
from ..errors import InvalidArgumentError
from ..runners.ports import UINT8, require_onnx
from .structure import Payload, Structure, unique

if TYPE_CHECKING:
    import onnx

FORMAT, VERSION, CONTENT = "yobx_flatten.format", "yobx_flatten.format_version", "yobx_flatten.content"
STRUCTURE, CHECKSUM = "yobx_flatten.structure", "yobx_flatten.structure_crc32"

_FLOAT = 1
_INLINE = 1024  # bytes; smaller tensors are stored in the model file
_TOGETHER = 16 * 2**20  # bytes; up to this size, all tensors are stored in the model file
_LARGEST = 2**31 - 2**26  # bytes; protobuf's limit, minus room for names and shapes
_ALIGNED = 64  # bytes
_PIECE = 16 * 2**20  # bytes written at once


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
        """Add a value to the ONNX graph, as an initializer or, for a stored seed, as a ``RandomUniform`` node."""
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
        check_size(total, function, "leave external_data as it is")
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
        raise InvalidArgumentError(
            f"{function}: {nbytes / 1e9:.1f} GB do not fit into one ONNX file, whose limit is 2 GB; {remedy}."
        )
