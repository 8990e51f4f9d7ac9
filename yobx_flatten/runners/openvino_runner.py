"""Run OpenVINO or ONNX files in OpenVINO, in float32 on the CPU.

OpenVINO computes in bfloat16 where a processor has it, and states it nowhere: scores of a small model were off by 0.5.
So the precision is asked for here, also that of keys and values in its state, which it would store in 8 bits.
"""

from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ..errors import DamagedFileError, FlattenError, ForeignFileError, GenerationError, ReplayError
from ..errors.dependencies import require
from ..errors.failures import raised_as
from .checked_runner import CheckedRunner
from .in_place import new_tokens
from .openvino_state import BEAMS, StateCache, variable_of
from .ports import split_cache, with_rows
from .signature import KEY, Signature, Size

__all__ = ["FLOAT32", "OpenVINORunner", "import_openvino", "last_line", "open_openvino", "read_model"]

FLOAT32: Mapping[str, str] = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""What a model is compiled with."""

_TYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "boolean": torch.bool,
    "u8": torch.uint8,
    **{f"i{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
}


def import_openvino() -> Any:
    """Import OpenVINO without its reports of use.

    The import sends an event over the network from a process that it forks, and a fork of a process with threads (of
    torch, of JAX) may hang. OpenVINO itself does without the package that sends where it is not installed.
    """
    sender = "openvino_telemetry"
    if "openvino" in sys.modules or sender in sys.modules:
        return importlib.import_module("openvino")
    sys.modules[sender] = None  # type: ignore[assignment] # as if it were not installed
    try:
        return importlib.import_module("openvino")
    finally:
        del sys.modules[sender]


class OpenVINORunner(CheckedRunner):
    """One model, open; a :class:`.runner.Runner`."""

    runtime: ClassVar[str] = "openvino"

    def __init__(self, compiled: Any, signature: Signature, name: str) -> None:
        super().__init__(signature, name)
        self._compiled, self._request = compiled, compiled.create_infer_request()
        kept = {state.name for state in self._request.query_state()}
        pairs = {slot.port.name: slot.present for slot in self.slots if slot.present is not None}
        self.in_place = {name: present for name, present in pairs.items() if variable_of(name, present) in kept}
        self._given = [name for name in self.ports if name not in self.in_place]

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run one call; see :meth:`.runner.Runner.run`. The state is set before it, and read after it."""
        if not self.in_place:
            return super().run(inputs)
        bound = dict(zip(self.ports, self.signature.bind(inputs, ReplayError, self.name), strict=True))
        with raised_as(lambda error: ReplayError(f"OpenVINO fails on the inputs of the case: {last_line(error)}")):
            cache = StateCache(
                self._request, {slot.port.name: bound[slot.port.name] for slot in self.slots}, self.in_place
            )
            found = self._call_with_state([bound[name] for name in self._given], cache, new_tokens(bound))
            kept = {self.in_place[name]: tensor for name, tensor in cache.tensors().items()}
        return {name: kept[name] if name in kept else found[name] for name in self.outputs}

    def cache(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return a cache for :meth:`step`: the state of a request where it is in the model."""
        if not self.in_place.keys() <= tensors.keys() or not self.in_place:
            return super().cache(tensors)
        with raised_as(lambda error: GenerationError(f"{self.name} stopped: {last_line(error)}")):
            return StateCache(self._compiled.create_infer_request(), tensors, self.in_place)

    def step(
        self, feeds: Mapping[str, torch.Tensor], cache: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Run one call of a loop; see :meth:`.runner.Runner.step`."""
        if not self.in_place:
            return super().step(feeds, cache)
        state = cache if isinstance(cache, StateCache) else self.cache(cache)
        assert isinstance(state, StateCache)
        tensors = self.signature.bind({**state.others, **feeds}, GenerationError, self.name, state.shapes)
        with raised_as(lambda error: GenerationError(f"{self.name} stopped: {last_line(error)}")):
            found = self._call_with_state(tensors, state, new_tokens(feeds))
        slots = [slot for slot in self.slots if slot.port.name not in self.in_place]
        outputs, following = split_cache(found, slots, state)
        state.update(following)
        return outputs, state

    def select_rows(self, cache: Mapping[str, Any], rows: torch.Tensor) -> dict[str, Any]:
        """Return a cache with other rows; see :meth:`.runner.Runner.select_rows`."""
        if not isinstance(cache, StateCache):
            return super().select_rows(cache, rows)
        cache.select_rows(rows)
        cache.update({name: with_rows(value, rows) for name, value in cache.others.items()})
        return cache

    def _call_with_state(self, tensors: list[torch.Tensor], state: StateCache, tokens: int) -> dict[str, torch.Tensor]:
        given = {name: tensor.numpy() for name, tensor in zip(self._given, tensors, strict=True)}
        found = state.request.infer({**given, BEAMS: state.rows.numpy()}, share_inputs=True, share_outputs=False)
        state.grown(tokens)
        made = [name for name in self.outputs if name not in self.in_place.values()]
        return {name: torch.from_numpy(found[index]) for index, name in enumerate(made)}

    def _call(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        # inputs are read where they are; the memory of outputs is used again by the next call
        found = self._request.infer([tensor.numpy() for tensor in tensors], share_inputs=True, share_outputs=False)
        return [torch.from_numpy(found[index]) for index in range(len(self.outputs))]

    def _reason(self, error: BaseException) -> str:
        return last_line(error)


def read_model(path: pathlib.Path) -> Any:
    """Read a model of OpenVINO, or an ONNX file."""
    # path: the `.xml` file, with the weights in a `.bin` file of the same name next to it; or an `.onnx` file
    openvino = import_openvino()
    with raised_as(lambda error: DamagedFileError(f"OpenVINO cannot read {path}: {last_line(error)}")):
        return openvino.Core().read_model(str(path))


def open_openvino(path: pathlib.Path, *, caller: str, failure: type[FlattenError]) -> OpenVINORunner:
    """Open a model. It is data: OpenVINO runs operators of its own."""
    # failure: class of the error where there is no such file, or OpenVINO cannot compile it
    require("openvino", purpose=caller, extra="openvino")
    openvino = import_openvino()
    if not path.is_file():
        raise failure(f"There is no file {path}.")
    model = read_model(path)
    signature = _signature(model, path)
    written = "" if path.suffix == ".xml" else ' Files that are written for it are those of target="openvino".'
    with raised_as(lambda error: failure(f"OpenVINO cannot compile {path}: {last_line(error)}{written}")):
        compiled = openvino.Core().compile_model(model, "CPU", dict(FLOAT32))
    return OpenVINORunner(compiled, signature, path.name)


def last_line(error: BaseException) -> str:
    """Return the reason of an error: the lines before it are places in OpenVINO's sources."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def _signature(model: Any, path: pathlib.Path) -> Signature:
    """The stored signature, which knows how sizes depend on each other; else what the model itself states."""
    for place in ([KEY], ["framework", KEY]):  # of its own files; of the metadata of an ONNX file
        if model.has_rt_info(place):
            return Signature.from_json(model.get_rt_info(place).astype(str), str(path))
    inputs = []
    for port in model.inputs:
        kind = port.element_type.get_type_name()
        if not port.names or kind not in _TYPES:
            raise ForeignFileError(f"{path} has an input {port.names or 'without a name'} of type {kind}.")
        sizes: tuple[Size, ...] = tuple(
            None if size.is_dynamic else size.get_length() for size in port.get_partial_shape()
        )
        inputs.append((port.get_any_name(), _TYPES[kind], sizes))
    return Signature(inputs, [port.get_any_name() for port in model.outputs])
