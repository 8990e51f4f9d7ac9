"""Simulate a training step: seconds, bubbles, traffic of links and disk, peak memory, and what the step waits for.

::

    # a step     forward and backward of all microbatches  |  optimizer    synchronous: one after the other
    #            with is_async="exact", a layer is updated while the forward of those before it runs

:func:`roundpipe_runtime.schedule.simulate` runs the schedule; this module provides its loads and sums up its result.
"""

from __future__ import annotations

import dataclasses
import itertools
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
from .layer_footprint import LayerFootprint
from .memory_estimate import DeviceMemory, HostMemory, device_memory, room_to_keep
from .step_plan import StepPlan, stage_loads


@dataclasses.dataclass(frozen=True, slots=True)
class StepSimulation:
    """A simulated training step.

    Attributes:
        seconds: time from one step to the next.
        run: forward and backward, with bytes of each link and every stage's times.
        unhindered: the same, if transfers and the optimizer took no time.
        loads: time and traffic of each stage, in the order of dispatch.
        optimizer_seconds: time of AdamW on the host.
        exposed_optimizer: seconds of it in which the devices wait.
        device_memory: peak memory of each device.
        host_memory: memory of the host.
        stays: whether layers stay on a device from their forward to their backward.
        keep_parameters: what stays from step to step: GB of each device, or ``"auto"``.
        tokens: tokens of the step.
        busy: seconds in which each part of the machine is busy, the mean of all devices: ``"compute"``,
            ``"link up"``, ``"link down"``, ``"interpreter"``, ``"optimizer"``, ``"disk"`` where the state is on one.
        called: seconds in which a device waits for the host to call layers, the mean of all devices.
        disk: bytes that the step stores and moves on a disk; ``None`` in memory.
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
    called: float = 0.0
    disk: DiskUse | None = None

    @property
    def bottleneck(self) -> str:
        """The bottleneck, a key of ``busy``."""
        return max(self.busy, key=lambda name: self.busy[name])

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of training."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def bubbles(self) -> dict[str, float]:
        """Shares of the devices' time in which they do not compute, by the causes of a timeline.

        ``"transfer"`` would not be there if copies took no time, ``"optimizer"`` is the optimizer's,
        ``"interpreter"`` the host's that calls the layers, and ``"dependency"`` the filling and draining of the
        pipeline, and stages that wait for longer ones.
        """
        whole = self.seconds or 1.0
        transfer = max(0.0, self.seconds - self.exposed_optimizer - self.unhindered.time) / whole
        optimizer = self.exposed_optimizer / whole
        computed = self.run.utilisation * self.run.time / whole
        interpreter = self.called / whole
        dependency = max(0.0, 1.0 - transfer - optimizer - computed - interpreter)
        return {"transfer": transfer, "optimizer": optimizer, "dependency": dependency, "interpreter": interpreter}


def simulate(
    plan: StepPlan,
    machine: Hardware,
    *,
    is_async: Literal[False, True, "exact"] = False,
    stays: bool | None = None,
    keep_parameters: float | Literal["auto"] = 0,
    host: Literal["memory", "disk"] = "memory",
) -> StepSimulation:
    """Simulate a training step on a machine.

    Args:
        plan: training step, from :func:`step_plan`, or ``plan`` of a :class:`PlanReport`.
        machine: devices and host: :func:`describe_hardware`, or :func:`load_machine` for a file.
        is_async: when the optimizer runs, as in ``RoundPipe.step``. ``False``, after the run; ``"exact"``, layer by
            layer next to the next run; ``True``, next to it with weights one step old.
        stays: whether layers stay on a device from their forward to their backward. Default: if there is room.
        keep_parameters: what stays on devices from step to step, as in :class:`RoundPipeRunConfig`. The step is one of
            those in which parameters that do not train are there already. Default: 0.
        host: ``"disk"``: the state is on a disk with the rates of the machine, as with ``RoundPipe(host="disk:DIR")``,
            and gradients are clipped to a norm. Default: ``"memory"``.

    Returns:
        The simulated step.

    Raises:
        ConfigError: ``keep_parameters`` is none of these, or the rates of the disk are not known.

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
        # memory of virtual devices without a limit is that of the host, of which a few layers are there at a time
        stays = stays_on_devices(plan, machine) and not (host == "disk" and machine.is_virtual and not machine.memory)
    room = _room(plan, machine, keep_parameters, stays=stays)
    loads = stage_loads(plan, machine, stays=stays, room_to_keep=room)
    optimizer = plan.optimizer_bytes / machine.host_rate
    disk = None
    if host == "disk":
        _check_disk(machine)
        disk = disk_use(plan.host_memory, plan.layers, loads)
        optimizer = optimizer_seconds(plan.host_memory, plan.layers, machine, optimizer)
        loads = on_disk(loads)
    alone = simulate_schedule(loads, machine_of(machine, linked=True), plan.num_microbatch)
    run, seconds = _next_to_optimizer(plan, loads, machine, alone, is_async, optimizer)
    return StepSimulation(
        seconds=seconds,
        run=run,
        loads=loads,
        unhindered=simulate_schedule(loads, machine_of(machine, linked=False), plan.num_microbatch),
        optimizer_seconds=optimizer,
        exposed_optimizer=seconds - alone.time,
        device_memory=_memory_of_devices(plan, machine, stays=stays, room=room),
        host_memory=plan.host_memory,
        stays=stays,
        keep_parameters=keep_parameters,
        tokens=plan.tokens,
        busy=_busy(plan, loads, machine, disk),
        called=_seconds_called(plan, loads) / len(machine.names),
        disk=disk,
    )


def _check_disk(machine: Hardware) -> None:
    if machine.disk_read is None or machine.disk_write is None:
        raise ConfigError(
            "How fast the disk reads and writes is not known. Measure it:\n"
            "    roundpipe doctor --disk DIR --machine FILE"
        )


def _room(plan: StepPlan, machine: Hardware, keep_parameters: float | Literal["auto"], *, stays: bool) -> float:
    """Bytes of each device for parameters that stay there from step to step."""
    RoundPipeRunConfig(keep_parameters=keep_parameters)  # raises if the value is invalid
    return room_to_keep(keep_parameters, plan.stages, plan.layers, machine.memory, fits=stays)


def _next_to_optimizer(
    plan: StepPlan,
    loads: Sequence[StageLoad],
    machine: Hardware,
    alone: Simulation,
    is_async: Literal[False, True, "exact"],
    optimizer: float,
) -> tuple[Simulation, float]:
    """The run of a step as the optimizer lets it continue, and the seconds of both."""
    if is_async is False:
        return alone, alone.time + optimizer
    run = alone
    if is_async == "exact":
        updated = _with_updates(plan, loads, machine, optimizer)
        run = simulate_schedule(updated, machine_of(machine, linked=True), plan.num_microbatch)
    return run, max(run.time, optimizer)


def machine_of(machine: Hardware, *, linked: bool) -> Machine:
    """Return the devices of a machine, with its links or with ones that take no time."""
    count, overlaps = len(machine.names), not machine.is_virtual
    if not linked:
        return Machine(count, overlaps=overlaps)
    rates = {"disk_read": machine.disk_read or math.inf, "disk_write": machine.disk_write or math.inf}
    return Machine(count, machine.link, down=machine.down, overlaps=overlaps, **rates)


def _memory_of_devices(plan: StepPlan, machine: Hardware, *, stays: bool, room: float) -> list[DeviceMemory]:
    return device_memory(
        plan.stages,
        RoundRobin(len(machine.names)).assign(len(plan.stages)),
        plan.layers,
        plan.num_microbatch,
        stays=stays,
        prefetches=not machine.is_virtual,
        room_to_keep=room,
    )


def _seconds_called(plan: StepPlan, loads: Sequence[StageLoad]) -> float:
    """Seconds in which devices wait for the host to call layers, over all devices."""
    pairs = zip(plan.stages, loads, strict=True)
    return sum(load.called * len(stage.microbatches(plan.num_microbatch)) for stage, load in pairs)


def stays_on_devices(plan: StepPlan, machine: Hardware) -> bool:
    """Return whether every device has room for all parameters and gradients at once, so that layers stay there."""
    needed = sum(layer.param_bytes + layer.grad_bytes for layer in plan.layers)
    return machine.memory is None or needed <= FOR_PARAMETERS * machine.memory


def _with_updates(plan: StepPlan, loads: Sequence[StageLoad], machine: Hardware, optimizer: float) -> list[StageLoad]:
    """The loads of a run in parallel with the previous step's optimizer, which visits the layers in the same order."""
    sizes = [layer.grad_bytes + layer.table_grad_bytes for layer in plan.layers]
    whole, sums = sum(sizes) or 1, itertools.accumulate(sizes)
    ready = [optimizer * size / whole for size in sums]
    found = []
    for stage, load in zip(plan.stages, loads, strict=True):
        forward = [plan.seconds(dataclasses.replace(stage, layers=range(i, i + 1)), machine) for i in stage.layers]
        if stage.kind == "fused":  # its first layers are read in the forward, which is a third of it
            forward = [seconds / 3 for seconds in forward]
        if stage.kind == "backward":
            forward = [0.0] * len(forward)
        needed = itertools.accumulate(forward, initial=0.0)
        updates = [(ready[layer], second) for layer, second in zip(stage.layers, needed, strict=False)]
        found.append(dataclasses.replace(load, updates=updates))
    return found


def _busy(plan: StepPlan, loads: Sequence[StageLoad], machine: Hardware, disk: DiskUse | None) -> dict[str, float]:
    """Seconds in which each part of the machine is busy, the mean of all devices."""
    devices, microbatches = len(machine.names), plan.num_microbatch
    without_calls = dataclasses.replace(machine, call=0.0)
    # a copy of the last stage has some of the microbatches
    counts = [len(stage.microbatches(microbatches)) for stage in plan.stages]
    # gradients of single microbatches, down from all copies but the last, and up to that one
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
        read = disk.read_in_run + disk.read_for_norm + disk.read_in_step
        written = disk.written_in_run + disk.written_in_step
        found["disk"] = max(read / (machine.disk_read or math.inf), written / (machine.disk_write or math.inf))
    return found


# Bytes that may wait to be written before the host waits, as in `roundpipe_runtime.device.disk`.
_BACKLOG = 256 * 2**20

# Layers that are in memory at the same time: the current one, and the next.
_AT_HAND = 2


# Estimate the disk traffic and the optimizer time of a step with its state on a disk.
#
#     run     a stage's parameters are read before its upload, its gradients are written after their download
#     clip    gradients are read once, for their norm
#     step    layer 0: read | update | write      the reads of a layer run next to the update of the one before it,
#                     layer 1: read | update | write        and to the writes of those before that


@dataclasses.dataclass(frozen=True, slots=True)
class DiskUse:
    """The bytes that a step stores on a disk, and those that it reads and writes there."""

    nbytes: int  # parameters, gradients, master weights and optimizer state, which are on the disk
    resident: int  # what is in the memory of the host instead: a few layers, and activations
    read_in_run: int  # parameters, for the forward and again for the backward
    written_in_run: int  # gradients
    read_for_norm: int  # gradients, for the norm to which they are clipped
    read_in_step: int  # everything of the parameters that train
    written_in_step: int  # the same without gradients


def disk_use(host: HostMemory, layers: Sequence[LayerFootprint], loads: Sequence[StageLoad]) -> DiskUse:
    """Return the bytes that a step stores, reads and writes on a disk."""
    shares = _of_layers(host, layers)
    trained = sum(layer.trained_bytes for layer in layers)
    return DiskUse(
        nbytes=host.total - host.activations,
        resident=_AT_HAND * max((read for read, _ in shares), default=0) + host.activations,
        read_in_run=sum(load.upload for load in loads),
        written_in_run=sum(load.download for load in loads),
        read_for_norm=host.gradients,
        read_in_step=trained + host.masters + host.gradients + host.optimizer,
        written_in_step=trained + host.masters + host.optimizer,
    )


def on_disk(loads: Sequence[StageLoad]) -> list[StageLoad]:
    """Return the loads of stages whose parameters are read from a disk, and whose gradients are written there."""
    return [dataclasses.replace(load, read=load.upload, written=load.download) for load in loads]


def optimizer_seconds(host: HostMemory, layers: Sequence[LayerFootprint], machine: Hardware, in_memory: float) -> float:
    """Return the seconds of the optimizer on a disk, with the norm of all gradients before it."""
    # in_memory: seconds of all updates, if everything were in memory
    read_rate, write_rate = machine.disk_read or float("inf"), machine.disk_write or float("inf")
    whole = sum(layer.grad_bytes for layer in layers) or 1
    read_end = began = ended = 0.0
    writes: list[tuple[float, int]] = []  # when the write of each layer ends, and its bytes
    for layer, (read, written) in zip(layers, _of_layers(host, layers), strict=True):
        read_end = max(read_end, began) + read / read_rate
        began = max(ended, read_end)
        ended = began + in_memory * layer.grad_bytes / whole
        before = writes[-1][0] if writes else 0.0
        writes.append((max(before, ended) + written / write_rate, written))
        ended = max(ended, _when_room(writes))
    return host.gradients / read_rate + ended


def _when_room(writes: Sequence[tuple[float, int]]) -> float:
    """The second from which on no more bytes wait to be written than may."""
    waiting = 0
    for end, nbytes in reversed(writes):
        waiting += nbytes
        if waiting > _BACKLOG:
            return end
    return 0.0


def _of_layers(host: HostMemory, layers: Sequence[LayerFootprint]) -> list[tuple[int, int]]:
    """Bytes that the step of each layer reads and writes."""
    whole = sum(layer.grad_bytes for layer in layers) or 1
    kept = host.masters + host.optimizer
    found = []
    for layer in layers:
        share = layer.grad_bytes / whole
        written = int(layer.trained_bytes + share * kept)
        found.append((int(written + share * host.gradients), written))
    return found
