"""Measure how long layers and copies take, and plan stages, threads and device memory for a pipeline."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
from torch import nn

from ..device.protocol import Clock, Device
from ..optim.layer_contents import LargeTables, TableRule, needed_bytes, rule_for, scan
from ..schedule.partitioning import LayerCost, MeasuredCosts, analytic_cost
from ..schedule.plan import ModelExecutePlan, RunType
from ..schedule.timeline import Timeline
from .code_state import is_due

# If the forward of a layer takes fewer seconds on the CPU, two threads are slower than one: torch releases the GIL at
# each operator, so the threads would wait for each other.
_BRIEF = 150e-6

_MEASURED_FIRST = 4  # runs on accelerators that are measured
FOR_PARAMETERS = 0.6  # share of a device's memory for parameters and gradients; the rest is for activations
_STAGES_AT_ONCE = 2.1  # a device holds a stage, the next stage, which is being uploaded, and maybe a small stage


class Planner:
    # gradient_dtype: function that returns the dtype in which gradients of a parameter are summed
    # is_compiled: whether torch compiles layers
    # is_host_short: whether host memory is short. Virtual devices without a limit use host memory, so a limit is set
    # for them: room for a stage and the next stage, each with one large layer.

    def __init__(
        self,
        layers: Sequence[nn.Module],
        devices: Sequence[Device],
        gradient_dtype: Callable[[nn.Parameter], torch.dtype] = lambda parameter: parameter.dtype,
        large_tables: LargeTables = "whole",
        *,
        is_compiled: bool = False,
        is_host_short: bool = False,
    ) -> None:
        self._devices = devices
        self._is_host_short = is_host_short
        limit = stage_limit(_limit([device.memory for device in devices]))
        self.rule = rule_for(layers, large_tables, limit, gradient_dtype, is_compiled=is_compiled)
        # inference is measured separately, because its batches may have another size
        guessed = guessed_costs(layers, self.rule, gradient_dtype)
        self._training, self._inference = MeasuredCosts(guessed), MeasuredCosts(guessed)
        # By kind of run, number of copies and, if there are copies, number of microbatches: the plan, and the step at
        # which the plan is computed again.
        self._plans: dict[tuple[RunType, int | str, int | None], tuple[ModelExecutePlan, int]] = {}
        self._runs: collections.Counter[RunType] = collections.Counter()

    def measured(self, kind: RunType) -> MeasuredCosts:
        return self._inference if kind == "infer" else self._training

    def wants_events(self, kind: RunType) -> bool:
        """Count this pipeline call, and return whether to measure how long its work on accelerators takes."""
        # The first calls of a kind are measured, and the last two calls before an execution plan is computed again.
        self._runs[kind] += 1
        number = self._runs[kind]
        return number <= _MEASURED_FIRST or is_due(number - 1) or is_due(number)  # timing takes two events per task

    def layer_costs(self, kind: RunType = "fused") -> list[LayerCost]:
        own, other = (self._inference, self._training) if kind == "infer" else (self._training, self._inference)
        return (own if own.is_measured or not other.is_measured else other).costs()

    def memory_limit(self) -> float | None:
        """Return how many GB parameters and gradients may use on the smallest device; ``None`` if not known."""
        return self._limit([device.memory for device in self._devices])

    def _limit(self, memory: Sequence[int | None]) -> float | None:
        found = _limit(memory)
        if found is None and self._is_host_short and all(one.torch_device.type == "cpu" for one in self._devices):
            return 2 * max(cost.param_bytes + cost.grad_bytes for cost in self.layer_costs()) / 1e9
        return found

    def plan(
        self, kind: RunType, step: int, *, copies: int | Literal["auto"] = 1, num_microbatch: int | None = None
    ) -> ModelExecutePlan:
        """Return the current execution plan, which is computed again after 1, 2, 4, 8 ... pipeline calls."""
        # copies: number of copies of the fused stage, or `"auto"`
        # num_microbatch: number of microbatches for which copies are planned. Default: number of devices + 1.
        key = kind, copies, None if copies == 1 else num_microbatch
        plan, due = self._plans.get(key, (None, 0))
        if plan is None or step >= due:
            found = ModelExecutePlan.auto(
                kind,
                self.layer_costs(kind),
                min_stages=len(self._devices),
                model_memory_limit=self.memory_limit(),
                previous=plan,
                last_stage_copies=copies,
                num_microbatch=key[2],
            )
            plan = cast(ModelExecutePlan, found)
            self._plans[key] = plan, max(1, 2 * step)
        return plan

    def prefers_one_thread(self, kind: RunType) -> bool:
        """Return whether one thread should run all devices: on the CPU, if most time is spent in short layers."""
        on_cpu = all(device.torch_device.type == "cpu" for device in self._devices)
        return on_cpu and self.measured(kind).share_below(_BRIEF) > 0.5

    def fits(self) -> bool:
        memory = [device.memory for device in self._devices]  # each query takes a device some time
        for known, device in zip(memory, self._devices, strict=True):
            if known is None and device.torch_device.type != "cpu":
                return False
        limit = self._limit(memory)  # `None` for virtual devices without a limit
        return limit is None or sum(c.param_bytes + c.grad_bytes for c in self.layer_costs()) <= limit * 1e9

    def bytes_to_keep(self, wanted: float | Literal["auto"], largest_stage: int) -> float:
        # wanted: GB, or `"auto"`: no limit if everything fits, else the memory for parameters that stages leave free
        # largest_stage: bytes of the parameters and gradients of the largest stage
        if wanted != "auto":
            return wanted * 1e9
        limit = self.memory_limit()
        return bytes_to_keep(None if limit is None else limit * 1e9, largest_stage, fits=self.fits())


def stage_limit(memory_limit: float | None) -> float | None:
    """Return how many bytes one stage may use: half of the limit, because the next stage is loaded meanwhile."""
    return None if memory_limit is None else memory_limit * 1e9 / 2


def guessed_costs(
    layers: Sequence[nn.Module], rule: TableRule, gradient_dtype: Callable[[nn.Parameter], torch.dtype]
) -> list[LayerCost]:
    """Estimate the time and memory of layers that have not run yet."""
    costs = []
    for layer, contents in zip(layers, rule.mark(scan(layers)), strict=True):
        cost = analytic_cost(layer, gradient_dtype)
        if contents.tables:
            held, gradients = needed_bytes(contents, gradient_dtype)
            cost = dataclasses.replace(cost, param_bytes=held, grad_bytes=gradients)
        costs.append(cost)
    return costs


def bytes_to_keep(limit: float | None, largest_stage: int, *, fits: bool) -> float:
    """Return how many bytes of parameters may stay on each device with ``keep_parameters="auto"``.

    >>> bytes_to_keep(10e9, 4_000_000_000, fits=False), bytes_to_keep(10e9, 4_000_000_000, fits=True)
    (1600000000.0, inf)
    """
    # limit: bytes of a device for parameters and gradients, `None` if not known
    # largest_stage: bytes of the parameters and gradients of the largest stage
    # fits: whether there is room for all parameters and gradients at once
    if fits:
        return math.inf
    return 0.0 if limit is None else max(0.0, limit - _STAGES_AT_ONCE * largest_stage)


def _limit(memory: Sequence[int | None]) -> float | None:
    known = [nbytes for nbytes in memory if nbytes is not None]
    return FOR_PARAMETERS * min(known) / 1e9 if known else None


_NOT_MEASURED = contextlib.nullcontext()


class Timer:
    # with_events: whether work on an accelerator is also measured, by events in its streams, without a timeline

    def __init__(self, costs: MeasuredCosts, timeline: Timeline | None, *, with_events: bool = True) -> None:
        self._costs = costs
        self._timeline = timeline
        self._with_events = with_events or timeline is not None
        # By layer and microbatch: seconds of a forward whose backward has not ended; by microbatch: seconds of the
        # loss.
        self._forwards: dict[tuple[int, int], float] = {}
        self._losses: dict[int, float] = {}
        # By device: the clock, which the device's thread creates.
        self._clocks: dict[str, Clock] = {}
        self._late: list[tuple[Span, float | torch.Event]] = []

    def measures(self, device: Device) -> bool:
        return self._with_events or not self._clock(device).is_late

    def _clock(self, device: Device) -> Clock:
        clock = self._clocks.get(device.name)
        if clock is None:
            clock = self._clocks[device.name] = device.clock()
        return clock

    def measure(
        self, kind: str, stage: int, device: Device, microbatch: int = -1, layer: int = -1
    ) -> contextlib.AbstractContextManager[None]:
        """Measure the work in a ``with`` block; nothing is recorded if the block raises an exception."""
        # kind: kind of work, as in a timeline: `"forward"`, `"backward"`, `"upload"` and so on
        # microbatch, layer: -1 if the work is not for a single microbatch or layer
        if not self.measures(device):
            return _NOT_MEASURED
        return Span(self, kind, stage, device.name, self._clock(device), microbatch, layer)

    def add(self, span: Span, end: float | torch.Event) -> None:
        if span.clock.is_late:
            self._late.append((span, end))
        else:
            self._add(span, end)

    def add_parameters(self, uploaded: int, skipped: int) -> None:
        if self._timeline is not None:
            self._timeline.add_parameters(uploaded, skipped)

    def finish(self) -> None:
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
            # The cost of a backward includes the recomputed forward. The last layer's backward includes the loss.
            before = self._forwards.pop((layer, microbatch), 0.0) + self._losses.pop(microbatch, 0.0)
            self._costs.record(layer, "backward", end - start + before)
        else:
            self._forwards[layer, microbatch] = end - start
            if kind == "forward":
                self._costs.record(layer, "forward", end - start)


class Span:
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
