"""Simulate a pipeline schedule: its time, the bytes that it copies, and its peak memory on the devices."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from yobx_flatten.errors.failures import format_bytes

from ..errors import ConfigError
from .round_robin import RoundRobin, Step


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """The devices of a simulated machine, and their connections to CPU memory.

    Attributes:
        num_devices: number of devices, each with its own link.
        link: bytes per second from CPU memory to a device.
        memory: bytes of memory of a device.
        down: bytes per second from a device to CPU memory (default: ``link``).
        overlaps: whether a device computes while data is copied (default: ``True``). Virtual devices do not.
    """

    num_devices: int
    link: float = math.inf
    memory: float = math.inf
    down: float | None = None
    overlaps: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class StageLoad:
    """Computing time, copied bytes and memory of one pipeline stage.

    Attributes:
        compute: seconds of computation on one microbatch.
        upload: bytes of parameters that are copied to the device before the first microbatch.
        download: bytes of gradients that are copied to CPU memory after the last microbatch.
        inputs: bytes of activations that are copied to the device per microbatch.
        outputs: bytes of activations that are copied to CPU memory per microbatch.
        working: bytes that exist on the device during the computation of one microbatch.
        copies: number of devices that run the stage, each for every ``copies``-th microbatch (default: 1).
        copy: index of one of the ``copies`` devices, if only this device is described (default: ``None``, all devices).
        share: bytes of gradients that a device sends per microbatch to the last of the ``copies`` devices, which sums
            the gradients. With ``share=0``, the default, each device copies its own gradients to CPU memory.
    """

    compute: float
    upload: int = 0
    download: int = 0
    inputs: int = 0
    outputs: int = 0
    working: int = 0
    copies: int = 1
    copy: int | None = None
    share: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class TimedStep:
    """One stage on one microbatch in a simulated schedule, with its start and end times."""

    step: Step
    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True)
class Simulation:
    """The result of :func:`simulate`: start and end of all steps of a schedule, and idle times.

    Attributes:
        time: seconds until the last gradient is on the host.
        busy: seconds of computation, summed over all devices.
        utilisation: share of the time in which devices compute.
        bytes_up: host-to-device bytes.
        bytes_down: device-to-host bytes.
        links: a pair of numbers for each device: bytes copied to it, and bytes copied from it.
        peak_memory: largest number of bytes on one device.
        iteration_ends: the time at which the last step of each iteration ended.
        steps: every step of the schedule with its start and end times, in the order of dispatch.
    """

    time: float
    busy: float
    utilisation: float
    bytes_up: int
    bytes_down: int
    links: list[tuple[int, int]]
    peak_memory: int
    iteration_ends: list[float]
    steps: list[TimedStep]

    @property
    def bubble(self) -> float:
        """Share of the time in which devices wait or copy instead of computing."""
        return 1.0 - self.utilisation


def simulate(
    stages: Sequence[StageLoad],
    machine: Machine,
    num_microbatch: int,
    *,
    iterations: int = 1,
    staleness: int = 0,
    cursor: int = 0,
) -> Simulation:
    """Simulate the iterations of a pipeline on a machine.

    A device computes one stage on one microbatch at a time. While a device computes, the parameters of its next stage
    are copied to it, so it has the parameters of at most two stages. Copies of activations do not wait for copies of
    parameters. Each device has its own link to CPU memory. Without ``overlaps``, a device never computes and copies at
    the same time.

    Args:
        stages: the stages of one iteration in the order of dispatch.
        machine: the devices and their connections.
        num_microbatch: number of microbatches.
        iterations: number of iterations, one after the other.
        staleness: with 0, an iteration begins after the gradients of the previous iteration are complete. With
            ``staleness=1``, an iteration begins earlier, with parameters that lack the latest optimizer step.
        cursor: index of the device of the first stage.

    Returns:
        Times, copied bytes and peak memory.

    Raises:
        ConfigError: if a device has too little memory.

    >>> result = simulate([StageLoad(1.0)] * 4, Machine(2), 2)
    >>> result.time, result.utilisation
    (5.0, 0.8)
    """
    if staleness not in (0, 1):
        raise ConfigError(f"staleness must be 0 or 1, found {staleness!r}.")
    state = _State(machine, num_microbatch)
    ends = []
    deal = RoundRobin(machine.num_devices, cursor)
    for _ in range(iterations):
        begin = 0.0 if staleness else state.time
        state.done = [begin] * num_microbatch
        state.up = [max(free, begin) for free in state.up]
        for index, load in enumerate(stages):
            copies = range(load.copies) if load.copy is None else [load.copy]
            for copy, device in zip(copies, deal.assign(len(copies)), strict=True):
                is_sum = not load.share or copy + 1 == load.copies  # only the last copy downloads summed gradients
                one = dataclasses.replace(load, copy=copy, download=load.download if is_sum else 0)
                state.run(index, one, device, range(copy, num_microbatch, load.copies))
        ends.append(max(state.done, default=0.0))
    peak = 0
    for loads in state.loads:
        for load, following in itertools.zip_longest(loads, loads[1:], fillvalue=StageLoad(0.0)):
            # activations of the current microbatch, the next inputs and the previous outputs
            held = load.upload + load.download + load.working + 2 * (load.inputs + load.outputs)
            # gradients of two microbatches and, on the device that adds them, gradients from another copy
            held += (3 if load.download else 2) * load.share
            peak = max(peak, held + following.upload)
    if peak > machine.memory:
        raise ConfigError(
            f"A device needs {format_bytes(peak)} of memory, but has {format_bytes(machine.memory)}. Use smaller "
            "stages, or more microbatches:\n"
            f"    RoundPipeRunConfig(num_microbatch={num_microbatch * 2})"
        )
    whole = state.time * machine.num_devices
    return Simulation(
        time=state.time,
        busy=state.busy,
        utilisation=state.busy / whole if whole else 1.0,
        bytes_up=sum(state.bytes_up),
        bytes_down=sum(state.bytes_down),
        links=list(zip(state.bytes_up, state.bytes_down, strict=True)),
        peak_memory=peak,
        iteration_ends=ends,
        steps=state.steps,
    )


def makespan(times: Sequence[float], num_devices: int, num_microbatch: int) -> float:
    """Return the time of one iteration of a pipeline if data transfers take no time.

    Args:
        times: time of each stage on one microbatch, in the order of dispatch.
        num_devices: number of devices.
        num_microbatch: number of microbatches.

    Returns:
        The time of the iteration, in the unit of ``times``.

    >>> makespan([1.0, 1.0, 1.0, 1.0], 2, 2)
    5.0
    """
    return makespan_of_copies([(time, 1) for time in times], num_devices, num_microbatch)


def makespan_of_copies(stages: Sequence[tuple[float, int]], num_devices: int, num_microbatch: int) -> float:
    """Return the time of one iteration without data transfers, for stages that may run on several devices.

    >>> makespan_of_copies([(1.0, 1), (2.0, 2)], 3, 4)
    6.0
    """
    # stages: time of each stage on one microbatch and the number of its copies, in the order of dispatch
    free = [0.0] * num_devices
    done = [0.0] * num_microbatch
    device = 0
    for time, copies in stages:
        for copy in range(copies):
            now = free[device]
            for microbatch in range(copy, num_microbatch, copies):
                now = max(now, done[microbatch]) + time
                done[microbatch] = now
            free[device] = now
            device = (device + 1) % num_devices
    return max(free)


class _State:
    """The simulated times at which each device, each link and each microbatch is free for the next step."""

    def __init__(self, machine: Machine, num_microbatch: int) -> None:
        self.machine = machine
        self.done = [0.0] * num_microbatch
        self.computed = [0.0] * machine.num_devices
        self.up = [0.0] * machine.num_devices
        self.down = [0.0] * machine.num_devices
        self.bytes_up = [0] * machine.num_devices
        self.bytes_down = [0] * machine.num_devices
        # times at which the last two stages of each device ended: the memory of the earlier stage is free
        self.room = [[0.0, 0.0] for _ in range(machine.num_devices)]
        self.loads: list[list[StageLoad]] = [[] for _ in range(machine.num_devices)]
        self.steps: list[TimedStep] = []
        # `sent`: the time at which all gradients that copies of the last stage send to the last copy are on the host
        self.busy = self.sent = 0.0

    @property
    def time(self) -> float:
        return max([*self.computed, *self.down, *self.done])

    def run(self, index: int, load: StageLoad, device: int, microbatches: Sequence[int]) -> None:
        self.busy += load.compute * len(microbatches)
        # bytes of gradients that a copy of a stage receives from other copies, and that it sends
        is_last = (load.copy or 0) + 1 >= load.copies
        gathered = (len(self.done) - len(microbatches)) * load.share if is_last else 0
        sends = 0 if is_last else len(microbatches) * load.share
        self.bytes_up[device] += load.upload + len(microbatches) * load.inputs + gathered
        self.bytes_down[device] += load.download + len(microbatches) * load.outputs + sends
        self.loads[device].append(load)
        link, down = self.machine.link, self.machine.down or self.machine.link
        if not self.machine.overlaps:
            now = max(self.computed[device], self.up[device]) + load.upload / link
            for microbatch in microbatches:
                start = max(now, self.done[microbatch]) + load.inputs / link
                now = self._compute(index, load, device, microbatch, start) + load.outputs / down
                self.done[microbatch] = now
                if sends:
                    now += load.share / down
                    self.sent = max(self.sent, now)
            if gathered:
                now = max(now + gathered / link, self.sent + load.share / link)
            self.computed[device] = self.up[device] = now + load.download / down
            return
        arrived = max(self.up[device], self.room[device][0]) + load.upload / link
        now = max(self.computed[device], arrived)
        for microbatch in microbatches:
            start = max(now, self.done[microbatch] + load.inputs / link)
            now = self._compute(index, load, device, microbatch, start)
            self.done[microbatch] = now + load.outputs / down
            if sends:  # after the outputs, for which the next stage waits
                self.down[device] = max(self.down[device], self.done[microbatch]) + load.share / down
        self.computed[device] = now
        self.up[device] = arrived + len(microbatches) * load.inputs / link
        if sends:
            self.sent = max(self.sent, self.down[device])
        if gathered:
            self.up[device] = max(self.up[device] + gathered / link, self.sent + load.share / link)
            now = max(now, self.up[device])
        if load.download:
            self.down[device] = max(self.down[device], now) + load.download / down
        self.room[device] = [self.room[device][1], max(now, self.down[device] if load.download else now)]

    def _compute(self, index: int, load: StageLoad, device: int, microbatch: int, start: float) -> float:
        end = start + load.compute
        self.steps.append(TimedStep(Step(index, microbatch, device), start, end))
        return end
