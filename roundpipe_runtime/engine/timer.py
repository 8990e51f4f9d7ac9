"""Measure the work of a run, for the plan of later runs and for a timeline."""

from __future__ import annotations

import time

from ..schedule.costs import MeasuredCosts
from ..timeline.record import Timeline

__all__ = ["Span", "Timer"]


class Timer:
    """Measures work for the plan, and for a timeline if there is one."""

    def __init__(self, costs: MeasuredCosts, timeline: Timeline | None) -> None:
        self._costs = costs
        self._timeline = timeline
        # Of layers that wait for their backward: the forward that it will go back through; of microbatches, their loss.
        self._forwards: dict[tuple[int, int], float] = {}
        self._losses: dict[int, float] = {}

    def measure(self, kind: str, stage: int, device: str, microbatch: int = -1, layer: int = -1) -> Span:
        """Measure the work in a ``with`` block; an exception leaves no record.

        Args:
            kind: kind of work, as in a timeline: ``"forward"``, ``"backward"``, ``"upload"`` and so on.
            stage: index of the stage.
            device: name of the device.
            microbatch: index of the microbatch. Default: the work is for all of them.
            layer: index of the layer. Default: the work is not for one layer.

        Returns:
            The context manager.
        """
        return Span(self, kind, stage, device, microbatch, layer)

    def add(self, span: Span, end: float) -> None:
        """Take the time of a block that has ended.

        Args:
            span: the block.
            end: time of its end, by ``time.perf_counter``.
        """
        kind, layer, microbatch, start = span.kind, span.layer, span.microbatch, span.start
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
