"""Convert nested inputs to an ``onnx.ModelProto`` and back."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..core.files.document import damage_as
from ..errors import DamagedFileError, InvalidArgumentError, StoredFileError, describe_class
from ..registry.recipe.static_codec import is_array
from ..runners.onnx_session import open_session
from ..runners.ports import ELEMENTS, STRING, Element, pack
from .nested import OnnxWriter, check_size, open_model, read, structure_of
from .structure import Payload, Structure, flatten_tree, unflatten_tree

if TYPE_CHECKING:
    import onnx

_FLOATS = {name for name in ELEMENTS if name.startswith(("float", "bfloat")) and not name.startswith("float4")}


class MiniOnnxBuilder:
    """Builds an ONNX model that has no inputs and returns stored values by name.

    Args:
        target_opset: ONNX opset version; the model gets a newer version for some tensor types: 19 for 8-bit floats, 24
            for ``float8_e8m0fnu``, 21 for 4-bit integers, 23 for 4-bit floats, and 25 for 2-bit integers.
        ir_version: version of the ONNX file format (IR version).
        sep: separator in the names of the two outputs for a dict: ``___`` in ``<name>___keys`` and ``<name>___values``.

    >>> import numpy, onnxruntime
    >>> builder = MiniOnnxBuilder()
    >>> builder.append_output_initializer("weights", numpy.array([1.0, 2.0], dtype=numpy.float32))
    >>> builder.append_output_sequence("rows", [numpy.array([3]), numpy.array([4, 5])])
    >>> model = builder.to_onnx()
    >>> onnxruntime.InferenceSession(model.SerializeToString()).run(None, {})
    [array([1., 2.], dtype=float32), [array([3], dtype=int64), array([4, 5], dtype=int64)]]
    >>> create_input_tensors_from_onnx_model(model)
    {'weights': array([1., 2.], dtype=float32), 'rows': [array([3]), array([4, 5])]}
    """

    def __init__(self, target_opset: int = 18, ir_version: int = 10, sep: str = "___") -> None:
        self._opset, self._ir_version, self._sep = target_opset, ir_version, sep
        self._entries: dict[str, tuple[str, Any]] = {}

    def append_output_initializer(self, name: str, tensor: Any, randomize: bool = False) -> None:
        """Add a tensor that the model returns as the output with the given name.

        Args:
            name: name of the output.
            tensor: a tensor, a NumPy array, a number, text or another value that is not a container.
            randomize: whether to store only the type and the shape of a float tensor; the model then generates random
                values. ``False`` by default.

        Raises:
            InvalidArgumentError: when an output has that name already.
        """
        self._put(name, "random" if randomize else "one", tensor)

    def append_output_sequence(self, name: str, tensors: Sequence[Any]) -> None:
        """Add a list of tensors of one dtype, which the model returns as one sequence output.

        Args:
            name: name of the sequence output.
            tensors: a list of at least one tensor or array.

        Raises:
            InvalidArgumentError: when an output has that name already, ``tensors`` is empty, or an item is not a
                tensor or an array.
        """
        self._put(name, "sequence", list(tensors))

    def append_output_dict(self, name: str, tensors: Mapping[str, Any]) -> None:
        """Add a dict of tensors of one dtype as two outputs: the keys, and the sequence of the values.

        The outputs have the names ``<name>___keys`` and ``<name>___values``.

        Args:
            name: prefix of the output names ``<name>___keys`` and ``<name>___values``.
            tensors: a dict of at least one tensor or array, with text keys.

        Raises:
            InvalidArgumentError: when an output has that name already, ``tensors`` is empty, or an item is not a
                tensor or an array.
        """
        self._put(name, "dict", dict(tensors))

    def to_onnx(self) -> Any:
        """Return the model, from which :func:`create_input_tensors_from_onnx_model` reads the values by output name."""
        structure = flatten_tree({name: value for name, (_, value) in self._entries.items()})
        check_size(sum(payload.nbytes for payload in structure.payloads), "MiniOnnxBuilder", "Use save_nested")
        writer = OnnxWriter("MiniOnnxBuilder", opset=self._opset, ir_version=self._ir_version)
        payloads = {payload.record["name"]: payload for payload in structure.payloads}
        for (name, (kind, value)), part in zip(self._entries.items(), structure.json["children"], strict=True):
            records = _records(part)
            if kind in ("one", "random"):
                own = [payloads[record["name"]] for record in records if record.get("name") in payloads]
                again = [record for record in records if record["leaf"] == "same"]
                entry = Structure(part, own, again)
                writer.add_structure(randomized(entry) if kind == "random" else entry)
                continue
            if kind == "dict":
                keys = [key.encode() for key in value]
                writer.add(Payload({"name": f"{name}{self._sep}keys"}, STRING, (len(keys),), strings=keys))
                name = f"{name}{self._sep}values"
            writer.add_sequence(name, [payloads[record.get("as", record["name"])] for record in records])
        return writer.model(structure.json, "values")

    def _put(self, name: str, kind: str, value: Any) -> None:
        if name in self._entries:
            raise InvalidArgumentError(f"MiniOnnxBuilder: an output has the name {name!r} already. Choose a new name.")
        items = value if kind == "sequence" else value.values() if kind == "dict" else None
        if items is not None and not (items and all(map(is_array, items))):
            raise InvalidArgumentError(
                f"MiniOnnxBuilder: the output {name!r} must consist of one or more tensors or arrays, found "
                f"{describe_class(value)}."
            )
        self._entries[name] = kind, value


def create_onnx_model_from_input_tensors(
    inputs: Any, switch_low_high: bool | None = None, randomize: bool = False, sep: str = "___"
) -> Any:
    """Make an ONNX model in memory that contains nested inputs of another model.

    :func:`save_nested` writes nested values of any size to an ONNX file.

    Args:
        inputs: nested inputs, of the types that :func:`save_nested` accepts.
        switch_low_high: ignored, because every ONNX file is little-endian.
        randomize: whether to store only the types and shapes of float tensors; the model then generates random values.
            ``False`` by default.
        sep: ignored, because tensors are named by their key paths, such as ``past_key_values.0.key``.

    Returns:
        The ``onnx.ModelProto``.

    Raises:
        FlattenError: see :func:`save_nested`.
        InvalidArgumentError: when the values are too large for one file.

    >>> import torch
    >>> model = create_onnx_model_from_input_tensors({"x": torch.arange(3), "pair": (torch.zeros(1), None)})
    >>> [output.name for output in model.graph.output]
    ['x', 'pair.0']
    >>> create_input_tensors_from_onnx_model(model)
    {'x': tensor([0, 1, 2]), 'pair': (tensor([0.]), None)}
    """
    structure = flatten_tree(inputs)
    structure = randomized(structure) if randomize else structure
    function = "create_onnx_model_from_input_tensors"
    check_size(sum(payload.nbytes for payload in structure.payloads), function, "Use save_nested")
    writer = OnnxWriter(function)
    writer.add_structure(structure)
    return writer.model(structure.json, "values")


def create_input_tensors_from_onnx_model(
    proto: str | os.PathLike[str] | Any, device: Any = "cpu", engine: str = "onnx", sep: str = "___"
) -> Any:
    """Read nested inputs from an ONNX model, or from a file that contains such a model.

    Args:
        proto: the ``onnx.ModelProto``, or the path of a file.
        device: device of the tensors; ``"cpu"`` by default.
        engine: how to read the values: ``"onnx"``, the default, reads the initializers; ``"onnxruntime"`` and
            ``"ReferenceEvaluator"`` (``onnx.reference``) run the model and read its outputs.
        sep: the ``sep`` of the :class:`MiniOnnxBuilder` that made the model; used only by engines that run the model.

    Returns:
        The inputs that were passed to :func:`create_onnx_model_from_input_tensors`.

    Raises:
        StoredFileError: see :func:`load_nested`.
        NotRegisteredError: when a class in the file is not registered.
        InvalidArgumentError: when ``engine`` is not one of the three names above.

    >>> import torch
    >>> model = create_onnx_model_from_input_tensors([torch.arange(3), {"y": torch.ones(1)}])
    >>> create_input_tensors_from_onnx_model(model)
    [tensor([0, 1, 2]), {'y': tensor([1.])}]
    >>> create_input_tensors_from_onnx_model(model, engine="ReferenceEvaluator")
    [tensor([0, 1, 2]), {'y': tensor([1.])}]
    """
    function = "create_input_tensors_from_onnx_model"
    if engine == "onnx":
        return read(proto, function, device=device, content=None)
    model, folder = open_model(proto, function)
    name = "The model" if folder is None else os.fspath(proto)
    structure = structure_of(model, name)
    outputs = RunOutputs(model, None if folder is None else proto, engine, sep)
    with damage_as(DamagedFileError, name):
        return unflatten_tree(structure, outputs, device)


def _records(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [part] if "leaf" in part else [record for child in part["children"] for record in _records(child)]


def randomized(structure: Structure) -> Structure:
    """Replace the data of float tensors by seeds, from which the ONNX model generates random values when it runs."""
    payloads: list[Payload] = []
    for payload in structure.payloads:
        if payload.record["leaf"] == "torch" and payload.record["dtype"] in _FLOATS:
            payload.record["seed"] = len(payloads)
            payload = dataclasses.replace(payload, nbytes=0)
        payloads.append(payload)
    return structure._replace(payloads=payloads)


_ENGINES = ("onnx", "onnxruntime", "ReferenceEvaluator")


class RunOutputs:
    """Reads stored values by running the ONNX model, which returns them as outputs (see :class:`.structure.Source`)."""

    # path: the file of the model; `None` for a model in memory
    # sep: separator between the name of a dict and `keys` or `values`, see `MiniOnnxBuilder`
    def __init__(self, model: onnx.ModelProto, path: str | os.PathLike[str] | None, engine: str, sep: str) -> None:
        # the second name is onnx-diagnostic's evaluator, which runs the same operators as ONNX's reference
        if engine not in (*_ENGINES, "ExtendedReferenceEvaluator"):
            raise InvalidArgumentError(
                f"create_input_tensors_from_onnx_model: engine must be one of {', '.join(map(repr, _ENGINES))}, found "
                f"{describe_class(engine)}."
            )
        where = "The model" if path is None else os.fspath(path)
        if engine == "onnxruntime":
            given = model.SerializeToString() if path is None else path
            session: Any = open_session(given, caller="engine='onnxruntime'", failure=StoredFileError)
            names = [output.name for output in session.get_outputs()]
        else:
            from onnx.reference import ReferenceEvaluator

            with damage_as(DamagedFileError, where):
                session = ReferenceEvaluator(model if path is None else where)
            names = session.output_names
        with damage_as(DamagedFileError, where):
            outputs = dict(zip(names, session.run(None, {}), strict=True))
        self._outputs = dict(outputs)
        for name, values in outputs.items():  # the leaves of a sequence are `name.0`, those of a dict `name.key`
            if isinstance(values, list):
                base = name.removesuffix(f"{sep}values")
                keys = outputs.get(f"{base}{sep}keys", range(len(values)))
                self._outputs.update({f"{base}.{key}": value for key, value in zip(keys, values, strict=True)})

    def check(self, record: dict[str, Any], element: Element, dims: tuple[int, ...], nbytes: int) -> None:
        found = self._outputs.get(record["name"])
        if found is None or found.shape != dims:
            raise DamagedFileError(f"The model lacks an output of its metadata: {record['name']!r} of shape {dims}.")

    def fill(self, record: dict[str, Any], element: Element, view: memoryview) -> None:
        """Copy the bytes of an output to ``view``, after a conversion to the dtype of the stored value."""
        import numpy

        array = numpy.ascontiguousarray(self._outputs[record["name"]])
        if element.cast:  # the graph returns some dtypes as float32
            name = next(name for name, known in ELEMENTS.items() if known == element)
            if element.packed > 1:
                import ml_dtypes  # comes with onnx

                codes = array.astype(getattr(ml_dtypes, name)).reshape(-1).view(numpy.uint8)
                array = pack(codes, element.packed)
            else:
                array = torch.tensor(array).to(getattr(torch, name)).reshape(-1).view(torch.uint8).numpy()
        view[:] = array.reshape(-1).view(numpy.uint8).data

    def strings(self, record: dict[str, Any]) -> list[bytes]:
        return [text.encode() for text in self._outputs[record["name"]].reshape(-1).tolist()]
