"""The state and results of one run of a pipeline. Nothing reaches the model before the run has succeeded."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from ..batch.loss import LossContract
from ..device.events import NOW, Event
from ..device.transfer import HostValue
from ..device.worker import Mailbox
from ..errors import StageError
from ..optim.parameters import LayerContents, ParameterStore
from ..optim.readiness import ReadinessTable
from ..schedule.costs import MeasuredCosts
from ..schedule.plan import RunType
from ..schedule.round_robin import Stage
from ..timeline.record import Timeline
from .resident import Buffers, Gradients, LayerOnDevice

__all__ = ["Copies", "Run", "Timer", "captured_autocast"]

# Gradients of the tensors between two stages, on the host; ``None`` where none flows.
Copies = list[tuple[torch.Tensor, Event] | None]


class Timer:
    """Measures work for the plan, and for a timeline if there is one."""

    def __init__(self, costs: MeasuredCosts, timeline: Timeline | None) -> None:
        self._costs = costs
        self._timeline = timeline
        # Of layers that wait for their backward: the forward that it will go back through; of microbatches, their loss.
        self._forwards: dict[tuple[int, int], float] = {}
        self._losses: dict[int, float] = {}

    def measure(self, kind: str, stage: int, device: str, microbatch: int = -1, layer: int = -1) -> Span:
        """Measure the work in a ``with`` block; an exception leaves no record."""
        return Span(self, kind, stage, device, microbatch, layer)

    def add(self, span: Span, end: float) -> None:
        """Take the time of a block that has ended."""
        kind, layer, microbatch, start = span.kind, span.layer, span.microbatch, span.start
        if self._timeline is not None:
            self._timeline.add(kind, span.stage, microbatch, span.device, start, end, layer)
        if microbatch < 0:
            return
        if layer < 0:
            self._losses[microbatch] = self._losses.get(microbatch, 0.0) + end - start
        elif kind == "backward":
            # The loss is part of the first backward behind it, that of the last layer.
            before = self._forwards.pop((layer, microbatch), 0.0) + self._losses.pop(microbatch, 0.0)
            self._costs.record(layer, "backward", end - start + before)
        else:
            self._forwards[layer, microbatch] = end - start
            if kind == "forward":
                self._costs.record(layer, "forward", end - start)


class Span:
    """A piece of work under way. There are several per layer and microbatch, so it is a plain class."""

    __slots__ = ("device", "kind", "layer", "microbatch", "stage", "start", "timer")

    def __init__(self, timer: Timer, kind: str, stage: int, device: str, microbatch: int, layer: int) -> None:
        self.timer, self.kind, self.stage, self.device = timer, kind, stage, device
        self.microbatch, self.layer = microbatch, layer
        self.start = 0.0

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.timer.add(self, time.perf_counter())


@dataclasses.dataclass
class Run:
    """One pass over all microbatches.

    Attributes:
        kind: ``"infer"``, ``"train"`` (forward now, backward later) or ``"fused"``.
        stages: stages in the order of dispatch.
        contents: layers on the host.
        num_microbatch: number of microbatches.
        store: parameters.
        table: versions of the layers that may be read.
        version: version that this run reads.
        labels: labels of each microbatch.
        loss_fn: loss function of a fused run.
        contract: contract that reduces the losses.
        keep_outputs: whether a fused run returns the outputs of the last layer.
        base_seed: base of the seeds of layer calls.
        tag: name that distinguishes pipelines that run in the same step.
        step: number of completed runs of the pipeline before this one.
        stays: whether layers stay on a device from their forward to their backward, if they come there again.
        one_thread: whether the thread of one device does the work of all.
        take_gradient: function that is offered each gradient as soon as a microbatch has gone back through a layer.
    """

    kind: RunType
    stages: Sequence[Stage]
    contents: Sequence[LayerContents]
    num_microbatch: int
    store: ParameterStore
    table: ReadinessTable
    version: int
    timer: Timer
    requires_grad: bool
    recompute_grain: Literal["stage", "layer"]
    preserve_rng_state: bool
    base_seed: int
    tag: str
    step: int
    autocast: Sequence[dict[str, Any]]
    labels: Sequence[Any] = ()
    loss_fn: Callable[[Any, Any], Any] = lambda outputs, labels: outputs
    contract: LossContract = dataclasses.field(default_factory=lambda: LossContract("sum", []))
    keep_outputs: bool = True
    stays: bool = False
    one_thread: bool = False
    take_gradient: Callable[[nn.Parameter, torch.Tensor], bool] | None = None
    mailbox: Mailbox = dataclasses.field(default_factory=Mailbox)

    # What the run collects, by microbatch or by layer.
    outputs: dict[int, HostValue] = dataclasses.field(default_factory=dict)
    saved: dict[tuple[int, int], HostValue] = dataclasses.field(default_factory=dict)
    kept: dict[tuple[int, int], HostValue] = dataclasses.field(default_factory=dict)
    input_gradients: dict[int, Copies] = dataclasses.field(default_factory=dict)
    gradients: dict[int, Gradients] = dataclasses.field(default_factory=dict)
    buffers: dict[int, Buffers] = dataclasses.field(default_factory=dict)
    buffer_trail: dict[int, list[Buffers]] = dataclasses.field(default_factory=dict)
    residents: dict[tuple[str, int], LayerOnDevice] = dataclasses.field(default_factory=dict)
    _buffers_at_start: dict[tuple[int, int], torch.Tensor] = dataclasses.field(default_factory=dict)
    _versions: dict[int, list[int]] = dataclasses.field(default_factory=dict)

    @property
    def has_backward(self) -> bool:
        """Whether some layers will be called again."""
        return self.kind != "infer"

    @functools.cached_property
    def restarts(self) -> set[int]:
        """Layers from which a backward stage calls the forward again, so that their input is kept."""
        backward = [stage.layers for stage in self.stages if stage.kind == "backward"]
        if self.recompute_grain == "layer":
            return {layer for layers in backward for layer in layers}
        return {layers[0] for layers in backward}

    def source(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the tensor that stages copy for a parameter."""
        return self.store.source(parameter)

    def gradient_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which gradients of a parameter are summed."""
        return self.store.gradient_dtype(parameter)

    @contextlib.contextmanager
    def reading(self, layer: int) -> Iterator[None]:
        """Wait until this run's version of a layer is there, and keep it there for the block."""
        self.table.start_read(layer, self.version, check=self.mailbox.check)
        try:
            yield
        finally:
            self.table.end_read(layer)

    def start(self, microbatch: int, inputs: HostValue) -> None:
        """Pass the inputs of a microbatch to the first layer; also in a run of one fused stage."""
        self.mailbox.put(("activation", 0, microbatch), inputs)

    def release(self) -> None:
        """Release the memory of devices that this run still holds."""
        for resident in list(self.residents.values()):  # a stage that nobody waits for may still put one there
            resident.release()
        self.residents.clear()

    def discard(self) -> None:
        """Discard everything that was collected: the run has failed."""
        collected: list[dict[Any, Any]] = [
            self.outputs,
            self.saved,
            self.kept,
            self.input_gradients,
            self.gradients,
            self.buffers,
            self.buffer_trail,
        ]
        for values in collected:
            values.clear()
        self.mailbox.clear()

    # -- buffers -----------------------------------------------------------------------------------------------------

    def buffers_before(self, layer: int, microbatch: int) -> Buffers:
        """Return what the buffers that a layer writes held before a microbatch, for its recomputation."""
        trail = self.buffer_trail.get(layer)
        if not trail:
            return {}
        slots = self.contents[layer].buffers
        found: Buffers = {}
        for number in sorted({number for written in trail for number in written}):
            start = self._buffers_at_start.get((layer, number), slots[number].tensor)
            found[number] = (start, NOW)
            for written in trail[:microbatch]:
                found[number] = written.get(number, found[number])
        return found

    def check_buffers(self) -> None:
        """Refuse to commit buffers that two layers wrote.

        Raises:
            StageError: each would have had to see what the other wrote.
        """
        writers: dict[int, int] = {}
        for layer, written in sorted(self.buffers.items()):
            for number in written:
                slot = self.contents[layer].buffers[number]
                other = writers.setdefault(id(slot.tensor), layer)
                if other != layer:
                    raise StageError(
                        f"{self.contents[other].title} and {self.contents[layer].title} are the same module, or share "
                        f"one, and both write its buffer {slot.name!r}. Stages run one microbatch apart, so neither "
                        "would see what the other wrote. Give each layer a module of its own."
                    )

    def commit_buffers(self) -> None:
        """Write the buffers that the layers wrote back to the model, after :meth:`check_buffers`."""
        for layer, written in self.buffers.items():
            for number, (value, ready) in written.items():
                ready.result()
                slot = self.contents[layer].buffers[number]
                if self.kind == "train":
                    self._buffers_at_start[layer, number] = slot.tensor.clone()
                slot.store(value)
        self.buffers.clear()

    # -- gradients ---------------------------------------------------------------------------------------------------

    def remember_versions(self) -> None:
        """Note the versions of the parameters, for :meth:`check_unchanged`."""
        self._versions = {
            c.index: [self.source(parameter)._version for parameter in c.parameters()] for c in self.contents
        }

    def check_unchanged(self) -> None:
        """Refuse to go back through layers whose parameters changed since their forward."""
        for contents in self.contents:
            now = [self.source(parameter)._version for parameter in contents.parameters()]
            if now != self._versions[contents.index]:
                raise StageError(
                    f"A parameter of {contents.title} was changed between forward and backward, so the recomputation "
                    "would not be of the same function. Call backward before the optimizer's step."
                )

    def commit_gradients(self) -> None:
        """Add the gradients of this run to the gradient buffers, last layer first for any plan."""
        scale = self.contract.gradient_scale() if self.kind == "fused" else 1.0
        if scale == 0.0:
            self._zero_gradients()
        layers = []
        for layer in sorted(self.gradients, reverse=True):
            found = {}
            for parameter, (gradient, ready) in self.gradients[layer].items():
                ready.result()
                found[parameter] = gradient.mul_(scale) if scale not in (0.0, 1.0) else gradient
            layers.append(found)
        self.store.add_gradients(layers)
        self.gradients.clear()

    def _zero_gradients(self) -> None:
        """No microbatch had a weight: the loss is zero, and so are the gradients, as they would be of a constant."""
        self.store.add_gradients(
            [{p: torch.zeros_like(p) for p in c.parameters() if p.requires_grad} for c in self.contents]
        )


def captured_autocast(device_types: Sequence[str]) -> list[dict[str, Any]]:
    """Return the caller's autocast modes, as arguments for ``torch.autocast`` in another thread."""
    return [
        {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for kind in device_types
        if torch.is_autocast_enabled(kind)
    ]
