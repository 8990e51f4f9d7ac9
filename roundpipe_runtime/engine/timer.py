"""Measure the work of a run, for the plan of later runs and for a timeline."""

from __future__ import annotations

import contextlib

import torch

from ..device.protocol import Clock, Device
from ..schedule.costs import MeasuredCosts
from ..timeline.record import Timeline

_NOT_MEASURED = contextlib.nullcontext()


class Timer:
    """Measures work for the plan, and for a timeline if there is one."""

    # with_events: whether work is measured by events in the streams of an accelerator where there is no timeline.
    # Default: `True`.

    def __init__(self, costs: MeasuredCosts, timeline: Timeline | None, *, with_events: bool = True) -> None:
        self._costs = costs
        self._timeline = timeline
        self._with_events = with_events or timeline is not None
        # Of layers that wait for their backward: the forward that it will go back through; of microbatches, their loss.
        self._forwards: dict[tuple[int, int], float] = {}
        self._losses: dict[int, float] = {}
        # Each device has an entry, which its own thread makes.
        self._clocks: dict[str, Clock] = {}
        self._late: list[tuple[Span, float | torch.Event]] = []

    def measures(self, device: Device) -> bool:
        """Report whether the work of a device is measured in this run."""
        return self._with_events or not self._clock(device).is_late

    def _clock(self, device: Device) -> Clock:
        clock = self._clocks.get(device.name)
        if clock is None:
            clock = self._clocks[device.name] = device.clock()
        return clock

    def measure(
        self, kind: str, stage: int, device: Device, microbatch: int = -1, layer: int = -1
    ) -> contextlib.AbstractContextManager[None]:
        """Measure the work in a ``with`` block; an exception leaves no record."""
        # kind: kind of work, as in a timeline: `"forward"`, `"backward"`, `"upload"` and so on
        # microbatch: index of the microbatch. Default: the work is for all of them.
        # layer: index of the layer. Default: the work is not for one layer.
        if not self.measures(device):
            return _NOT_MEASURED
        return Span(self, kind, stage, device.name, self._clock(device), microbatch, layer)

    def add(self, span: Span, end: float | torch.Event) -> None:
        """Record the time of a block that has ended."""
        if span.clock.is_late:
            self._late.append((span, end))
        else:
            self._add(span, end)

    def add_parameters(self, uploaded: int, skipped: int) -> None:
        """Count bytes of parameters that were copied to devices, and of those that no layer read."""
        if self._timeline is not None:
            self._timeline.add_parameters(uploaded, skipped)

    def finish(self) -> None:
        """Take the times of devices that have ended their work, and begin with new clocks."""
        for span, end in self._late:
            self._add(span, end)
        self._late.clear()
        self._clocks.clear()

    def _add(self, span: Span, last: float | torch.Event) -> None:
        kind, layer, microbatch = span.kind, span.layer, span.microbatch
        start, end = span.clock.seconds(span.start), span.clock.seconds(last)
        if self._timeline is not None:
            self._timeline.add(kind, span.stage, microbatch, span.device, start, end, layer)
        if microbatch < 0:
            return
        if layer < 0:
            self._losses[microbatch] = self._losses.get(microbatch, 0.0) + end - start
        elif kind == "backward":
            # The loss is part of the first backward after it, that of the last layer.
            before = self._forwards.pop((layer, microbatch), 0.0) + self._losses.pop(microbatch, 0.0)
            self._costs.record(layer, "backward", end - start + before)
        else:
            self._forwards[layer, microbatch] = end - start
            if kind == "forward":
                self._costs.record(layer, "forward", end - start)


class Span:
    """A piece of work under way. There are several per layer and microbatch, so it is a plain class."""

    __slots__ = ("clock", "device", "kind", "layer", "microbatch", "stage", "start", "timer")

    def __init__(
        self, timer: Timer, kind: str, stage: int, device: str, clock: Clock, microbatch: int, layer: int
    ) -> None:
        self.timer, self.kind, self.stage, self.device, self.clock = timer, kind, stage, device, clock
        self.microbatch, self.layer = microbatch, layer
        self.start: float | torch.Event = 0.0

    def __enter__(self) -> None:
        self.start = self.clock.now(self.kind)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.timer.add(self, self.clock.now(self.kind))
