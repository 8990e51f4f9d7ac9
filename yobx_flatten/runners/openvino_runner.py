"""Run OpenVINO or ONNX files in OpenVINO, in float32 on the CPU.

By default, OpenVINO reduces precision silently. It computes in bfloat16 on processors that support bfloat16, which
changes the logits of a small model by 0.5. It also stores the keys and values of its state in 8 bits.
"""

from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ..errors import DamagedFileError, FlattenError, ForeignFileError, require
from ..errors.failures import raised_as
from .in_place import CheckedRunner, InPlaceCache
from .ports import presents_of
from .signature import KEY, Signature

FLOAT32: Mapping[str, str] = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""Options for compiling a model."""

_TYPES = {"bf16": torch.bfloat16, "boolean": torch.bool, "u8": torch.uint8}
_TYPES |= {f"f{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)}
_TYPES |= {f"i{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)}


def import_openvino(name: str = "openvino") -> Any:
    """Import OpenVINO, or its library ``nncf``, with the telemetry disabled."""
    # The telemetry sends an event over the network from a forked process at import, and a fork of a process with
    # threads (of torch, of JAX) may hang. The libraries send nothing if this package is not installed.
    sender = "openvino_telemetry"
    if name in sys.modules or sender in sys.modules:
        return importlib.import_module(name)
    sys.modules[sender] = None  # type: ignore[assignment] # as if it were not installed
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules[sender]


def last_line(error: BaseException) -> str:
    """Return the last line of an OpenVINO error, which states the cause; earlier lines name OpenVINO's source files."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


class OpenVINORunner(CheckedRunner):
    runtime: ClassVar[str] = "openvino"
    _reason = staticmethod(last_line)

    def __init__(self, compiled: Any, signature: Signature, name: str) -> None:
        super().__init__(signature, name)
        self._compiled, self._request = compiled, compiled.create_infer_request()
        kept = {state.name for state in self._request.query_state()}
        presents = presents_of(self.slots)
        self.in_place = {name: present for name, present in presents.items() if name + present in kept}
        self._given = [name for name in self.ports if name not in self.in_place]

    def _written_in_place(self, leaves: Mapping[str, torch.Tensor]) -> InPlaceCache:
        return StateCache(self._compiled.create_infer_request(), leaves, self.in_place)

    def _call_in_place(self, tensors: list[torch.Tensor], cache: InPlaceCache, tokens: int) -> Sequence[torch.Tensor]:
        assert isinstance(cache, StateCache)
        given = {name: tensor.numpy() for name, tensor in zip(self._given, tensors, strict=True)}
        found = cache.request.infer({**given, BEAMS: cache.rows.numpy()}, share_inputs=True, share_outputs=False)
        return [torch.from_numpy(found[index]) for index in range(len(self.outputs) - len(self.in_place))]

    def _call(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        # inputs are not copied; outputs are, since the next call writes to the same memory
        found = self._request.infer([tensor.numpy() for tensor in tensors], share_inputs=True, share_outputs=False)
        return [torch.from_numpy(found[index]) for index in range(len(self.outputs))]


def read_model(path: pathlib.Path) -> Any:
    # path: an `.xml` file, with the weights in a `.bin` file of the same name in the same folder; or an `.onnx` file
    openvino = import_openvino()
    with raised_as(lambda error: DamagedFileError(f"OpenVINO cannot read {path}: {last_line(error)}")):
        return openvino.Core().read_model(str(path))


def open_openvino(
    path: pathlib.Path, *, caller: str, failure: type[FlattenError], threads: int | None = None
) -> OpenVINORunner:
    """Open an OpenVINO or ONNX file in OpenVINO. The file may be untrusted, since it contains no code."""
    # failure: class of the error if the file is missing, or OpenVINO cannot compile the file
    # threads: number of threads that one operator can use; `None` for OpenVINO's own choice
    require("openvino", purpose=caller, extra="openvino")
    openvino = import_openvino()
    if not path.is_file():
        raise failure(f"There is no file {path}.")
    model = read_model(path)
    # the signature stored in an OpenVINO file or in an ONNX file, or one made from the model's inputs
    place = next(filter(model.has_rt_info, ([KEY], ["framework", KEY])), None)
    if place is not None:
        signature = Signature.from_json(model.get_rt_info(place).astype(str), str(path))
    else:
        inputs = []
        for port in model.inputs:
            kind = port.element_type.get_type_name()
            if not port.names or kind not in _TYPES:
                raise ForeignFileError(f"{path}: the input {port.names or '(no name)'} of type {kind} is unsupported.")
            sizes = [None if size.is_dynamic else size.get_length() for size in port.get_partial_shape()]
            inputs.append((port.get_any_name(), _TYPES[kind], tuple(sizes)))
        outputs = [port.get_any_name() if port.names else f"{at}" for at, port in enumerate(model.outputs)]
        signature = Signature(inputs, outputs)
    written = "" if path.suffix == ".xml" else ' To write files for OpenVINO, export with target="openvino".'
    with raised_as(lambda error: failure(f"OpenVINO cannot compile {path}: {last_line(error)}{written}")):
        limit = {} if threads is None else {"INFERENCE_NUM_THREADS": str(threads)}
        compiled = openvino.Core().compile_model(model, "CPU", {**FLOAT32, **limit})
    return OpenVINORunner(compiled, signature, path.name)


BEAMS = "beam_idx"
"""Name of the input that selects, for each row, which row of the cache to continue; OpenVINO's tools use this name."""


class StateCache(InPlaceCache):
    """A KV cache in state variables of an OpenVINO request."""

    # request: an `openvino.InferRequest` that no other cache uses

    def __init__(self, request: Any, values: Mapping[str, torch.Tensor], presents: Mapping[str, str]) -> None:
        parts = {state.name: state for state in request.query_state()}
        self._parts = {name: parts[name + present] for name, present in presents.items()}
        super().__init__({**values, **self._parts}, presents)
        self.request = request
        self._write({name: values[name] for name in presents})

    def _write(self, leaves: Mapping[str, torch.Tensor]) -> None:
        import openvino

        self.shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
        self.rows = torch.arange(len(next(iter(leaves.values()))), dtype=torch.int32)
        if not any(leaf.numel() for leaf in leaves.values()):  # OpenVINO does not accept an empty state
            self.request.reset_state()
            return
        for name, leaf in leaves.items():
            self._parts[name].state = openvino.Tensor(leaf.contiguous().numpy())

    def tensors(self) -> dict[str, torch.Tensor]:
        kept = {name: torch.from_numpy(self._parts[name].state.data) for name in self.shapes}
        return {
            name: kept[name].new_zeros(shape) if 0 in shape else kept[name][self.rows.long()]
            for name, shape in self.shapes.items()
        }

    def grown(self, tokens: int) -> None:
        shapes = self.shapes.items()
        self.shapes = {name: (len(self.rows), heads, seen + tokens, *size) for name, (_, heads, seen, *size) in shapes}
        self.rows = torch.arange(len(self.rows), dtype=torch.int32)

    def crop(self, kept: int) -> None:
        self._write({name: leaf[:, :, :kept] for name, leaf in self.tensors().items()})

    def select_rows(self, rows: torch.Tensor) -> None:
        # rows: for each new row the index of an old row. If their number is unchanged, the next call selects the rows
        if len(rows) == len(self.rows):
            self.rows = self.rows[rows]
            self.shapes = {name: (len(rows), *shape[1:]) for name, shape in self.shapes.items()}
        else:
            self._write({name: leaf[rows] for name, leaf in self.tensors().items()})
