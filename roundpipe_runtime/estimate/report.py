"""Simulate a training step, and report its time and memory before anything is allocated.

:func:`roundpipe_runtime.schedule.simulate` simulates the schedule. It needs each stage's compute time and copied bytes.
"""

# a step                forward and backward of all microbatches | optimizer
# is_async="exact"      optimizer | backward                           or the run alone, whichever is longer
# a state on a disk     each part takes at least as long as the disk needs for its bytes

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn

from ..engine.config import RoundPipeRunConfig
from ..engine.planner import FOR_PARAMETERS, guessed_costs
from ..errors import ConfigError, PlanError
from ..optim.layer_contents import TableRule, scan
from ..optim.parameters import Update
from ..schedule.partitioning import CLEAR_GAIN, LayerCost
from ..schedule.plan import ModelExecutePlan
from ..schedule.round_robin import RoundRobin, Stage
from ..schedule.simulation import Machine, Simulation, StageLoad
from ..schedule.simulation import simulate as simulate_schedule
from .footprint import LayerFootprint
from .hardware import Hardware
from .step_plan import DeviceMemory, HostMemory, StepPlan, device_memory, room_to_keep, stage_loads, step_plan

# Seconds for a stage without matrix products: a small value that orders the plan but does not change sums.
_NEXT_TO_NOTHING = 1e-7


@dataclasses.dataclass(frozen=True, slots=True)
class StepSimulation:
    """A simulated training step.

    Attributes:
        seconds: seconds from the start of a step to the start of the next step.
        run: simulation of the forward and backward: times of every stage, and bytes copied to and from each device.
        unhindered: simulation of the step if copies and the optimizer took no time.
        loads: compute time and copied bytes of each stage, in the order in which stages are dispatched to devices.
        optimizer_seconds: time of AdamW on the host.
        exposed_optimizer: seconds in which the devices wait for the optimizer.
        device_memory: peak memory of each device.
        host_memory: host memory that the training needs, by purpose.
        stays: whether layers stay on a device from their forward to their backward.
        keep_parameters: GB of each device's memory for parameters that stay from step to step, or ``"auto"``.
        tokens: number of tokens in the step, over all microbatches.
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
        """The resource that limits the speed of the step: the key of ``busy`` with the most seconds."""
        return max(self.busy, key=lambda name: self.busy[name])

    @property
    def tokens_per_second(self) -> float:
        """Number of tokens per second that the simulated training processes."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def bubbles(self) -> dict[str, float]:
        """Shares of a step's time in which devices do not compute, by cause, such as ``"transfer"``.

        Devices wait for copies (``"transfer"``), for the optimizer (``"optimizer"``), or for other stages
        (``"dependency"``), for example while the pipeline fills or drains, or while a longer stage runs.
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
        plan: the plan of one training step, from :func:`step_plan` or the attribute ``step`` of a :class:`PlanReport`.
        machine: devices and host, from :func:`describe_hardware` or :func:`load_machine`.
        is_async: when the optimizer updates the weights, as in ``RoundPipe.step``. ``False``: after the backward.
            ``"exact"``: during the next step, layer by layer. ``True``: during the next step, whose forward and
            backward use the weights from before the update.
        stays: whether layers stay on a device from their forward to their backward (default: if the device has enough
            memory).
        keep_parameters: GB of each device's memory for parameters that stay from step to step, as in
            :class:`RoundPipeRunConfig` (default: 0). Frozen parameters that stay on a device are not copied in a step.
        host: where the training state is stored (default: ``"memory"``). ``"disk"`` simulates
            ``RoundPipe(host="disk:DIR")`` with gradient clipping, which reads all gradients from the disk once more.

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
        if machine.disk_read is None or machine.disk_write is None:
            raise ConfigError(
                "The rates at which the disk reads and writes are not known. Measure the disk:\n"
                "    roundpipe doctor --disk DIR --machine FILE"
            )
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


def machine_of(machine: Hardware, *, linked: bool) -> Machine:
    how: Any = {"link": machine.link, "down": machine.down} if linked else {}  # without links, copies take no time
    return Machine(len(machine.names), overlaps=not machine.is_virtual, **how)


def _busy(plan: StepPlan, loads: Sequence[StageLoad], machine: Hardware, disk: DiskUse | None) -> dict[str, float]:
    devices, without_calls = len(machine.names), dataclasses.replace(machine, call=0.0)
    computed, up, down = 0.0, 0, 0
    for stage, load in zip(plan.stages, loads, strict=True):
        count = len(stage.microbatches(plan.num_microbatch))  # a copy of the last stage runs some of them
        # the other copies send the gradients of each microbatch down, and the last copy receives them
        share = 0 if stage.is_last_copy else count * load.share
        computed += count * plan.seconds(stage, without_calls)
        up += load.upload + count * load.inputs + share
        down += (load.download if load.copy in (None, load.copies - 1) else 0) + count * load.outputs + share
    found = {
        "compute": computed / devices,
        "link up": up / machine.link / devices,
        "link down": down / (machine.down or machine.link) / devices,
        "interpreter": len(plan.layers) * plan.num_microbatch * machine.call,  # one for all devices
        "optimizer": plan.optimizer_bytes / machine.host_rate,
    }
    if disk is not None:
        found["disk"] = disk.seconds(machine, disk.read, disk.written)
    return found


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
        """Return the seconds that the disk needs, if it reads and writes at the same time.

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
        resident=2 * largest + host.activations,  # the current layer and the next layer are in memory
        read_in_run=sum(load.upload for load in loads),
        written_in_run=sum(load.download for load in loads),
        read_for_norm=host.gradients,
        read_in_step=stepped + host.gradients,
        written_in_step=stepped,
    )


# -- the report of a plan --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class PlanReport:
    step: StepPlan  # the training step, whatever machine runs it
    simulated: StepSimulation  # the step on the devices and the host
    hardware: Hardware  # devices and host
    # tokens per step above which forward stages compute for longer than their uploads take
    tokens_forward: float
    tokens_backward: float  # the same for backward stages
    # why the runtime cannot make a plan: one layer is too large. Then the plan is for devices without a limit. Else "".
    too_large: str
    least_memory: int  # bytes that a device must have for the runtime to make a plan
    # forward of a frozen reference model, which runs after the trained model and needs no further device memory
    reference_seconds: float | None = None

    @property
    def layers(self) -> Sequence[LayerFootprint]:
        return self.step.layers

    def simulate(
        self,
        step: StepPlan | None = None,
        *,
        is_async: Literal[False, True, "exact"] = False,
        keep_parameters: float | Literal["auto"] | None = None,
    ) -> StepSimulation:
        # step: training step. Default: the one of this plan.
        # is_async: when the optimizer runs, as in `RoundPipe.step`. Default: after the run.
        # keep_parameters: parameters that stay on devices between steps. Default: those of this plan.
        host: Literal["memory", "disk"] = "memory" if self.disk is None else "disk"
        keep = self.simulated.keep_parameters if keep_parameters is None else keep_parameters
        how: Any = {"stays": self.simulated.stays, "keep_parameters": keep, "host": host}
        return simulate(step or self.step, self.hardware, is_async=is_async, **how)

    @property
    def disk(self) -> DiskUse | None:
        """Bytes that a step stores, reads and writes on the disk; ``None`` if the training state is in host memory."""
        return self.simulated.disk

    @property
    def host_bytes(self) -> int:
        return self.host_memory.total if self.disk is None else self.disk.resident

    @property
    def device_memory(self) -> list[DeviceMemory]:
        return self.simulated.device_memory

    @property
    def host_memory(self) -> HostMemory:
        return self.simulated.host_memory

    @property
    def simulation(self) -> Simulation:
        return self.simulated.run

    @property
    def fits_devices(self) -> bool | None:
        """Whether the training fits into the memory of each device; ``None`` if that memory is not known."""
        if self.hardware.memory is None:
            return None
        return not self.too_large and max(m.total for m in self.device_memory) <= self.hardware.memory

    @property
    def fits_host(self) -> bool | None:
        """Whether the training fits into the memory of the host; ``None`` if that memory is not known."""
        return None if self.hardware.host is None else self.host_bytes <= self.hardware.host


def plan_report(
    model: nn.Module,
    pieces: Sequence[nn.Module],
    layers: Sequence[LayerFootprint],
    hardware: Hardware,
    *,
    num_microbatch: int,
    tokens: int,
    optim_dtype: torch.dtype | None = None,
    last_stage_copies: int | Literal["auto"] = 1,
    keep_parameters: float | Literal["auto"] = 0,
    rule: TableRule | None = None,
    least_rule: TableRule | None = None,
    host: Literal["memory", "disk"] = "memory",
    update: Update = "masters",
) -> PlanReport:
    # model: the model whose parameters the host holds; they can be on `meta`
    # layers: footprint of each layer for one microbatch
    # optim_dtype: dtype of the optimizer. Default: the dtype of each parameter.
    # last_stage_copies: number of devices that run the last layer, each on some of the microbatches. `"auto"`: the
    # smallest number with which the simulated step is about as fast as possible. Default: 1.
    # keep_parameters: parameters that stay on devices between steps, as in `RoundPipeRunConfig`. Default: 0.
    # rule: which tables are copied in parts, in the layers as they were measured. Default: none.
    # least_rule: the same with the least memory that a device may have. Default: `rule`.
    # host: where parameters, gradients and the optimizer's state are. Default: `"memory"`.
    # update: what the optimizer updates, and when, as in `RoundPipe`. Default: `"masters"`.
    rule = rule or TableRule()

    def sums_in(parameter: nn.Parameter) -> torch.dtype:
        return optim_dtype if optim_dtype and parameter.is_floating_point() else parameter.dtype

    guessed = guessed_costs(pieces, rule, sums_in)
    if rule.mark(scan(pieces))[-1].trains_tables:
        last_stage_copies = 1  # as in the runtime
    least = max(cost.param_bytes + cost.grad_bytes for cost in guessed_costs(pieces, least_rule or rule, sums_in))
    costs = []
    for cost, layer in zip(guessed, layers, strict=True):  # times from operations, bytes as the runtime counts them
        forward_time = layer.forward_flops / hardware.flops + _NEXT_TO_NOTHING
        backward_time = forward_time + layer.backward_flops / hardware.flops + _NEXT_TO_NOTHING
        costs.append(dataclasses.replace(cost, forward=forward_time, backward=backward_time))
    limit = None if hardware.memory is None else FOR_PARAMETERS * hardware.memory
    if limit is None and host == "disk" and hardware.is_virtual:  # their memory is host memory
        limit = 2 * max(cost.param_bytes + cost.grad_bytes for cost in costs)
    plans, too_large = _plans(costs, hardware, limit, last_stage_copies, num_microbatch)
    how: Any = {"num_microbatch": num_microbatch, "tokens": tokens, "optim_dtype": optim_dtype, "update": update}
    steps = [step_plan(plan, layers, model, **how) for plan in plans]
    stays = limit is None or sum(cost.param_bytes + cost.grad_bytes for cost in costs) <= limit
    simulated = [simulate(step, hardware, stays=stays, keep_parameters=keep_parameters, host=host) for step in steps]
    # the fewest copies of the last stage that fit the memory and are about as fast as the fastest
    peaks = [max(device.total for device in one.device_memory) for one in simulated]
    memory = hardware.memory
    fitting = [number for number, peak in enumerate(peaks) if memory is None or peak <= memory] or [0]
    fastest = min(simulated[number].seconds for number in fitting)
    best = next(number for number in fitting if simulated[number].seconds * (1 - CLEAR_GAIN) <= fastest)
    step, loads = steps[best], simulated[best].loads
    forward = [load for stage, load in zip(step.stages, loads, strict=True) if stage.kind == "forward"]
    return PlanReport(
        step=step,
        simulated=simulated[best],
        hardware=hardware,
        tokens_forward=_tokens_to_hide(forward, tokens / num_microbatch, hardware),
        tokens_backward=_tokens_to_hide(loads[len(forward) :], tokens / num_microbatch, hardware),
        too_large=too_large,
        # a stage gets half of the parameter memory, since the next stage is loaded while it computes
        least_memory=int(2 * least / FOR_PARAMETERS),
    )


def _plans(
    costs: list[LayerCost],
    hardware: Hardware,
    limit: float | None,
    last_stage_copies: int | Literal["auto"],
    num_microbatch: int,
) -> tuple[list[ModelExecutePlan], str]:
    """Return an execution plan for each number of copies of the last stage, and the error if no plan fits in memory."""

    def plan(copies: int, limit: float | None) -> ModelExecutePlan:  # as the runtime plans from layer times
        found = ModelExecutePlan.auto(
            "fused",
            costs,
            min_stages=len(hardware.names),
            model_memory_limit=None if limit is None else limit / 1e9,
            last_stage_copies=copies,
            num_microbatch=None if copies == 1 else num_microbatch,
        )
        return cast(ModelExecutePlan, found)

    too_large = ""
    try:
        plan(1, limit)
    except PlanError as error:
        too_large, limit = str(error), None
    most = min(len(hardware.names), num_microbatch)
    numbers = range(1, most + 1) if last_stage_copies == "auto" else [last_stage_copies]
    return [plan(number, limit) for number in numbers], too_large


def _tokens_to_hide(loads: Sequence[StageLoad], tokens: float, machine: Hardware) -> float:
    """Return the number of tokens per step for which computing takes as long as copying parameters and gradients.

    The compute time of a stage grows with the tokens; the time to copy parameters and gradients does not.
    """
    compute, down = sum(load.compute for load in loads), machine.down or machine.link
    copies = max(sum(load.upload for load in loads) / machine.link, sum(load.download for load in loads) / down)
    return tokens * copies / compute if compute else 0.0


def with_reference(report: PlanReport, tensors: Iterable[torch.Tensor], *, shares_weights: bool) -> PlanReport:
    """Add the cost of a frozen reference model of the same size to a report."""
    # tensors: parameters and buffers of the model; those of the reference have the same sizes
    # shares_weights: whether the reference is the model without its adapters
    size = 0 if shares_weights else sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    host = dataclasses.replace(report.host_memory, reference=size)
    simulated = dataclasses.replace(report.simulated, host_memory=host)
    # a forward through all layers, in the stages of the training
    groups = [*report.step.plan.fwd_plan, report.step.plan.bwd_plan[0]]
    stages = [Stage(number, "forward", range(group[0], group[-1] + 1)) for number, group in enumerate(groups)]
    loads = [
        StageLoad(
            compute=report.step.seconds(stage, report.hardware),
            upload=sum(report.layers[index].param_bytes for index in stage.layers),
            inputs=report.layers[stage.layers[0]].inputs,
            outputs=report.layers[stage.layers[-1]].outputs,
        )
        for stage in stages
    ]
    run = simulate_schedule(loads, machine_of(report.hardware, linked=True), report.step.num_microbatch)
    return dataclasses.replace(report, simulated=simulated, reference_seconds=run.time)
