"""The round-robin pipeline schedule: which device runs which stage on which microbatch, and in which order.

Stages are assigned to the devices in turn, as in RoundPipe (Luo et al., 2026, arXiv 2604.27085). A stage runs all
microbatches on one device. The next stage runs on the next device, one microbatch later, as :func:`draw` shows. In
GPipe (Huang et al., 2019, arXiv 1811.06965) and in the 1F1B schedule of PipeDream (Harlap et al., 2018, arXiv
1806.03377), a device always runs the same stage. Two ideas are from GPipe: the microbatches of a batch fill the
pipeline, and the forward is recomputed for the backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from ..errors import ConfigError

Kind: TypeAlias = Literal["forward", "fused", "backward"]


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage: consecutive layers that are loaded onto a device together, and then compute each microbatch.

    Attributes:
        index: position of the stage in the schedule, from 0.
        kind: ``"forward"``, ``"fused"`` (forward, loss and backward without recomputation) or ``"backward"`` (a
            recomputed forward and its backward).
        layers: indices of the layers, ascending.
        copy: index of this copy of the stage, from 0 (default: 0).
        copies: number of devices with a copy of the stage; each runs every ``copies``-th microbatch (default: 1).
    """

    index: int
    kind: Kind
    layers: range
    copy: int = 0
    copies: int = 1

    @property
    def is_last_copy(self) -> bool:
        """Whether this copy is the last one of its stage; the last copy adds up the gradients of all copies."""
        return self.copy + 1 == self.copies

    @property
    def gradient_sets(self) -> int:
        """How many gradient tensors the device needs memory for, per parameter of the stage."""
        # Without copies, the sums. With copies, the gradients of two microbatches; on the device of the last copy,
        # which adds all gradients, also the sums and the gradients from another copy.
        return 1 if self.copies == 1 else 4 if self.is_last_copy else 2

    def microbatches(self, num_microbatch: int) -> range:
        """Return the microbatches that this copy of the stage computes.

        Args:
            num_microbatch: number of microbatches of the batch.

        >>> list(Stage(3, "fused", range(6, 7), copy=1, copies=2).microbatches(5))
        [1, 3]
        """
        return range(self.copy, num_microbatch, self.copies)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The work of one pipeline stage on one microbatch."""

    stage: int
    microbatch: int
    device: int


def stages_of(
    run_type: str, fwd_plan: Sequence[range], bwd_plan: Sequence[range], last_stage_copies: int = 1
) -> list[Stage]:
    """List the stages of an execution plan in the order in which they are dispatched to devices.

    >>> [(s.kind, list(s.layers)) for s in stages_of("fused", [range(0, 2)], [range(2, 4), range(0, 2)])]
    [('forward', [0, 1]), ('fused', [2, 3]), ('backward', [0, 1])]
    """
    # bwd_plan: layers of the backward stages, last layers first. In a fused run, the first of them is the fused stage.
    # last_stage_copies: number of devices that run the fused stage; each copy is a separate stage
    kinds: list[tuple[Kind, range]] = [("forward", layers) for layers in fwd_plan]
    if run_type != "infer":
        kinds += [("backward", layers) for layers in bwd_plan]
    stages = [(kind, layers, 0, 1) for kind, layers in kinds]
    if run_type == "fused":
        copies = last_stage_copies
        stages[len(fwd_plan) : len(fwd_plan) + 1] = [("fused", bwd_plan[0], copy, copies) for copy in range(copies)]
    return [Stage(index, *stage) for index, stage in enumerate(stages)]


def stages_within(stages: Sequence[Stage], span: range) -> list[Stage]:
    """Restrict stages to the layers in ``span``, and drop stages that become empty.

    >>> [list(stage.layers) for stage in stages_within(stages_of("infer", [range(0, 2), range(2, 3)], []), range(1, 3))]
    [[1], [2]]
    """
    cut = [(one, range(max(one.layers.start, span.start), min(one.layers.stop, span.stop))) for one in stages]
    held = [(one, layers) for one, layers in cut if layers]
    return [dataclasses.replace(one, index=index, layers=layers) for index, (one, layers) in enumerate(held)]


@dataclasses.dataclass(slots=True)
class RoundRobin:
    """Assigns stages to devices in turn, and remembers the next device.

    Attributes:
        num_devices: number of devices.
        cursor: index of the device that gets the next stage.

    >>> deal = RoundRobin(3)
    >>> deal.assign(4), deal.assign(2)
    ([0, 1, 2, 0], [1, 2])
    """

    num_devices: int
    cursor: int = 0

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise ConfigError(f"RoundRobin: num_devices must be at least 1, found {self.num_devices!r}.")
        self.cursor %= self.num_devices

    def assign(self, num_stages: int) -> list[int]:
        """Assign the next ``num_stages`` stages to devices in turn, and return the index of each stage's device."""
        devices = [(self.cursor + k) % self.num_devices for k in range(num_stages)]
        self.cursor = (self.cursor + num_stages) % self.num_devices
        return devices


def steps_in_order(
    devices: Sequence[int], num_microbatch: int, stages: Sequence[Stage] | None = None
) -> Iterator[Step]:
    """Yield the steps of a schedule, stage by stage, in an order in which one thread can dispatch them to the devices.

    A step (one stage on one microbatch) comes after all steps that it waits for. Each device gets its steps in the
    order of execution.

    Args:
        devices: the index of the device of each stage, from :meth:`RoundRobin.assign`.
        num_microbatch: number of microbatches.
        stages: the stages; only needed if a stage has copies, which divide the microbatches (default: no copies).

    Returns:
        An iterator over the steps of the schedule.
    """
    for stage, device in enumerate(devices):
        for microbatch in range(num_microbatch) if stages is None else stages[stage].microbatches(num_microbatch):
            yield Step(stage, microbatch, device)


def clock_cycles(
    devices: Sequence[int], num_microbatch: int, stages: Sequence[Stage] | None = None
) -> Iterator[list[Step]]:
    """Yield for each clock cycle the steps that run at the same time, if every step takes one cycle.

    A step waits for the step of the same microbatch in the previous stage, and for earlier steps of its device.

    Args:
        devices: the index of the device of each stage, from :meth:`RoundRobin.assign`.
        num_microbatch: number of microbatches.
        stages: the stages; only needed if a stage has copies, which divide the microbatches (default: no copies).

    Returns:
        An iterator over the clock cycles, each a list of steps.

    >>> for steps in clock_cycles([0, 1], 2):
    ...     print([(s.stage, s.microbatch) for s in steps])
    [(0, 0)]
    [(0, 1), (1, 0)]
    [(1, 1)]
    """
    ticks: dict[int, list[Step]] = {}
    free: dict[int, int] = {}
    done = [0] * num_microbatch
    for step in steps_in_order(devices, num_microbatch, stages):
        tick = max(free.get(step.device, 0), done[step.microbatch])
        ticks.setdefault(tick, []).append(step)
        free[step.device] = done[step.microbatch] = tick + 1
    for tick in range(max(ticks, default=-1) + 1):
        yield sorted(ticks.get(tick, []), key=lambda step: step.device)


def draw(stages: Sequence[Stage], devices: Sequence[int], num_microbatch: int) -> str:
    """Draw a pipeline schedule as text: a line per clock cycle, a column per device.

    Forward stages are called ``F0``, ``F1`` ..., and backward stages are called ``B0``, ``B1`` ... The fused stage is
    called ``L``. The first microbatch is called ``m0``. A dot is an idle clock cycle.

    Args:
        stages: the stages of a plan, from :func:`stages_of`.
        devices: the index of the device of each stage, from :meth:`RoundRobin.assign`.
        num_microbatch: number of microbatches.

    Returns:
        The drawing, with a title line.

    >>> stages = stages_of("fused", [range(0, 2), range(2, 3)], [range(3, 4), range(0, 3)])
    >>> print(draw(stages, RoundRobin(2).assign(len(stages)), 3))
    clock  device 0  device 1
      0    F0 m0     .
      1    F0 m1     F1 m0
      2    F0 m2     F1 m1
      3    L  m0     F1 m2
      4    L  m1     B0 m0
      5    L  m2     B0 m1
      6    .         B0 m2
    """
    counts = {"forward": 0, "backward": 0, "fused": 0}
    names = []
    for stage in stages:
        names.append("L" if stage.kind == "fused" else f"{stage.kind[0].upper()}{counts[stage.kind]}")
        counts[stage.kind] += 1
    columns = range(max(devices, default=-1) + 1)
    lines = ["clock  " + "  ".join(f"device {device}" for device in columns)]
    for tick, steps in enumerate(clock_cycles(devices, num_microbatch, stages)):
        cells = {step.device: f"{names[step.stage]:<2} m{step.microbatch}" for step in steps}
        row = "  ".join(f"{cells.get(device, '.'):<8}" for device in columns)
        lines.append(f"{tick:>3}    {row}".rstrip())
    return "\n".join(lines)
