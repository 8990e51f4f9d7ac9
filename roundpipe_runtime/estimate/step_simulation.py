"""Simulate a training step: seconds, bubbles, traffic of links and disk, peak memory, and the bottleneck.

:func:`roundpipe_runtime.schedule.simulate` simulates the schedule, with the loads of the stages from this module.
"""

# a step                forward and backward of all microbatches | optimizer
# is_async="exact"      optimizer | backward                           or the run alone, whichever is longer
# a state on a disk     each part takes at least as long as the disk needs for its bytes

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from ..engine.config import RoundPipeRunConfig
from ..engine.planner import FOR_PARAMETERS
from ..errors import ConfigError
from ..schedule.round_robin import RoundRobin
from ..schedule.simulation import Machine, Simulation, StageLoad
from ..schedule.simulation import simulate as simulate_schedule
from .hardware import Hardware
from .memory_estimate import DeviceMemory, HostMemory, device_memory, room_to_keep
from .step_plan import StepPlan, stage_loads


@dataclasses.dataclass(frozen=True, slots=True)
class StepSimulation:
    """A simulated training step.

    Attributes:
        seconds: seconds from the start of a step to the start of the next step.
        run: simulated forward and backward, with bytes of each link and every stage's times.
        unhindered: simulation of the step if copies and the optimizer took no time.
        loads: time and traffic of each stage, in the order of dispatch.
        optimizer_seconds: time of AdamW on the host.
        exposed_optimizer: seconds of the optimizer in which the devices wait.
        device_memory: peak memory of each device.
        host_memory: host memory that the training needs, by purpose.
        stays: whether layers stay on a device from their forward to their backward.
        keep_parameters: GB of each device for parameters that stay from step to step, or ``"auto"``.
        tokens: tokens of the step.
        busy: seconds in which each resource is busy, as the mean of all devices: ``"compute"``,
            ``"link up"``, ``"link down"``, ``"interpreter"``, ``"optimizer"``, ``"disk"`` if the state is on a disk.
        disk: bytes that the step stores, reads and writes on a disk; ``None`` if the state is in memory.
    """

    seconds: float
    run: Simulation
    unhindered: Simulation
    loads: Sequence[StageLoad]
    optimizer_seconds: float
    exposed_optimizer: float
    device_memory: list[DeviceMemory]
    host_memory: HostMemory
    stays: bool
    keep_parameters: float | Literal["auto"]
    tokens: int
    busy: Mapping[str, float]
    disk: DiskUse | None = None

    @property
    def bottleneck(self) -> str:
        """The resource that limits the speed of the step: a key of ``busy``."""
        return max(self.busy, key=lambda name: self.busy[name])

    @property
    def tokens_per_second(self) -> float:
        """Number of tokens per second that the simulated training processes."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def bubbles(self) -> dict[str, float]:
        """Shares of a step's time in which devices do not compute, by cause, such as ``"transfer"``.

        ``"transfer"`` is the share of time in which devices wait for copies, ``"optimizer"`` for the optimizer.
        ``"dependency"`` is the filling and draining of the pipeline, and waiting for longer stages.
        """
        whole = self.seconds or 1.0
        transfer = max(0.0, self.seconds - self.exposed_optimizer - self.unhindered.time) / whole
        optimizer = self.exposed_optimizer / whole
        computed = self.run.utilisation * self.run.time / whole
        dependency = max(0.0, 1.0 - transfer - optimizer - computed)
        return {"transfer": transfer, "optimizer": optimizer, "dependency": dependency}


def simulate(
    plan: StepPlan,
    machine: Hardware,
    *,
    is_async: Literal[False, True, "exact"] = False,
    stays: bool | None = None,
    keep_parameters: float | Literal["auto"] = 0,
    host: Literal["memory", "disk"] = "memory",
) -> StepSimulation:
    """Simulate a training step on a machine, and return times and the bottleneck.

    Args:
        plan: training step, from :func:`step_plan`, or ``step`` of a :class:`PlanReport`.
        machine: devices and host, from :func:`describe_hardware` or :func:`load_machine`.
        is_async: when the optimizer updates the weights, as in ``RoundPipe.step``: after the backward (``False``),
            layer by layer in the next step (``"exact"``), or in the next step, which uses old weights (``True``).
        stays: whether layers stay on a device from their forward to their backward (default: if the device has enough
            memory).
        keep_parameters: GB of each device for parameters that stay from step to step, as in :class:`RoundPipeRunConfig`
            (default: 0). Frozen parameters that stay there are not copied in a step.
        host: where the training state is; ``"disk"`` as with ``RoundPipe(host="disk:DIR")``, including the reads that
            the clipping of gradients needs (default: ``"memory"``).

    Returns:
        The simulated step.

    Raises:
        ConfigError: ``keep_parameters`` has an invalid value, or the rates of the disk are not known.

    >>> import torch
    >>> from roundpipe_runtime import ModelExecutePlan
    >>> from roundpipe_runtime.estimate import Hardware, measure_layers, simulate, step_plan
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, bias=False, device="meta") for _ in range(3)])
    >>> layers = measure_layers(list(model), (torch.empty(512, 4096, device="meta"),))
    >>> plan = ModelExecutePlan([range(2)], [range(2, 3), range(1, 2), range(1)])
    >>> machine = Hardware(("cuda:0",), "cuda", 10e12, 10e9, 2**30, 2**36, 20e9, {})
    >>> found = simulate(step_plan(plan, layers, model, num_microbatch=2, tokens=1024), machine)
    >>> found.bottleneck, round(found.busy["optimizer"] / found.busy["compute"], 2)
    ('optimizer', 2.05)
    """
    plan = plan.on(len(machine.names))
    if stays is None:
        whole = sum(layer.param_bytes + layer.grad_bytes for layer in plan.layers)
        fits = machine.memory is None or whole <= FOR_PARAMETERS * machine.memory
        # virtual devices without a limit use host memory, which holds a few layers of a state on a disk
        stays = fits and not (host == "disk" and machine.is_virtual and not machine.memory)
    RoundPipeRunConfig(keep_parameters=keep_parameters)  # raises if the value is invalid
    room = room_to_keep(keep_parameters, plan.stages, plan.layers, machine.memory, fits=stays)
    loads = stage_loads(plan, machine, stays=stays, room_to_keep=room)
    run = simulate_schedule(loads, machine_of(machine, linked=True), plan.num_microbatch)
    optimizer, disk, needed = plan.optimizer_bytes / machine.host_rate, None, 0.0
    if host == "disk":
        _check_disk(machine)
        disk = disk_use(plan, loads)
        needed = disk.seconds(machine, disk.read_in_run, disk.written_in_run)
        optimizer = max(optimizer, disk.seconds(machine, disk.read_in_step, disk.written_in_step))
        optimizer += disk.seconds(machine, disk.read_for_norm, 0)
    alone = max(run.time, needed)
    # the forward reads the last layer after the update of all layers, so only the backward follows the optimizer
    forward = [one.end for one in run.steps if plan.stages[one.step.stage].kind == "forward"]
    exact = max(alone, optimizer + run.time - max(forward, default=0.0))
    seconds = {False: alone + optimizer, True: max(alone, optimizer), "exact": exact}[is_async]
    return StepSimulation(
        seconds=seconds,
        run=run,
        loads=loads,
        unhindered=simulate_schedule(loads, machine_of(machine, linked=False), plan.num_microbatch),
        optimizer_seconds=optimizer,
        exposed_optimizer=seconds - alone,
        device_memory=device_memory(
            plan.stages,
            RoundRobin(len(machine.names)).assign(len(plan.stages)),
            plan.layers,
            plan.num_microbatch,
            stays=stays,
            prefetches=not machine.is_virtual,
            room_to_keep=room,
        ),
        host_memory=plan.host_memory,
        stays=stays,
        keep_parameters=keep_parameters,
        tokens=plan.tokens,
        busy=_busy(plan, loads, machine, disk),
        disk=disk,
    )


def _check_disk(machine: Hardware) -> None:
    if machine.disk_read is None or machine.disk_write is None:
        raise ConfigError(
            "How fast the disk reads and writes is not known. Measure the disk:\n"
            "    roundpipe doctor --disk DIR --machine FILE"
        )


def machine_of(machine: Hardware, *, linked: bool) -> Machine:
    """Return the machine for the simulation of a schedule; with ``linked=False``, copies take no time."""
    count, overlaps = len(machine.names), not machine.is_virtual
    if not linked:
        return Machine(count, overlaps=overlaps)
    return Machine(count, machine.link, down=machine.down, overlaps=overlaps)


def _busy(plan: StepPlan, loads: Sequence[StageLoad], machine: Hardware, disk: DiskUse | None) -> dict[str, float]:
    """Return the seconds in which each resource is busy, as the mean over all devices."""
    devices, microbatches = len(machine.names), plan.num_microbatch
    without_calls = dataclasses.replace(machine, call=0.0)
    # a copy of the last stage runs some of the microbatches
    counts = [len(stage.microbatches(microbatches)) for stage in plan.stages]
    # the other copies send the gradients of each microbatch down, and the last copy receives them
    shares = sum(
        count * load.share
        for stage, count, load in zip(plan.stages, counts, loads, strict=True)
        if not stage.is_last_copy
    )
    computed = sum(count * plan.seconds(stage, without_calls) for stage, count in zip(plan.stages, counts, strict=True))
    up = sum(load.upload + count * load.inputs for count, load in zip(counts, loads, strict=True))
    down = sum(
        (load.download if load.copy in (None, load.copies - 1) else 0) + count * load.outputs
        for count, load in zip(counts, loads, strict=True)
    )
    found = {
        "compute": computed / devices,
        "link up": (up + shares) / machine.link / devices,
        "link down": (down + shares) / (machine.down or machine.link) / devices,
        "interpreter": len(plan.layers) * microbatches * machine.call,  # one for all devices
        "optimizer": plan.optimizer_bytes / machine.host_rate,
    }
    if disk is not None:
        found["disk"] = disk.seconds(machine, disk.read, disk.written)
    return found


# Layers that are in memory at the same time: the current layer and the next layer.
_AT_HAND = 2


@dataclasses.dataclass(frozen=True, slots=True)
class DiskUse:
    """The bytes that a training step stores on, reads from and writes to a disk."""

    nbytes: int  # parameters, gradients, master weights and optimizer state, which are on the disk
    resident: int  # bytes in host memory: a few layers, and activations
    read_in_run: int  # parameters, for the forward and again for the backward
    written_in_run: int  # gradients
    read_for_norm: int  # gradients, for the norm to which they are clipped
    read_in_step: int  # complete state of the parameters that train
    written_in_step: int  # the same without gradients

    @property
    def read(self) -> int:
        """Number of bytes that a training step reads from the disk."""
        return self.read_in_run + self.read_for_norm + self.read_in_step

    @property
    def written(self) -> int:
        """Number of bytes that a training step writes to the disk."""
        return self.written_in_run + self.written_in_step

    def seconds(self, machine: Hardware, read: int, written: int) -> float:
        """Return the seconds that the disk needs for the bytes of a step if it reads and writes at the same time.

        Args:
            machine: devices and host, with the rates of the disk.
            read: bytes that the disk reads in a step.
            written: bytes that the disk writes in a step.
        """
        return max(read / (machine.disk_read or math.inf), written / (machine.disk_write or math.inf))


def disk_use(plan: StepPlan, loads: Sequence[StageLoad]) -> DiskUse:
    host, layers = plan.host_memory, plan.layers
    trained = sum(layer.trained_bytes for layer in layers)
    stepped = trained + host.masters + host.optimizer
    kept = host.masters + host.optimizer + host.gradients
    whole = sum(layer.grad_bytes for layer in layers) or 1
    largest = max((int(layer.trained_bytes + layer.grad_bytes / whole * kept) for layer in layers), default=0)
    return DiskUse(
        nbytes=host.total - host.activations,
        resident=_AT_HAND * largest + host.activations,
        read_in_run=sum(load.upload for load in loads),
        written_in_run=sum(load.download for load in loads),
        read_for_norm=host.gradients,
        read_in_step=stepped + host.gradients,
        written_in_step=stepped,
    )
