"""Report the memory and the step time of a training before anything is allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn

from ..engine.planner import FOR_PARAMETERS, guessed_costs
from ..errors import PlanError
from ..optim.layer_contents import TableRule, scan
from ..optim.parameters import Update
from ..schedule.costs import LayerCost
from ..schedule.partitioning import CLEAR_GAIN
from ..schedule.plan import ModelExecutePlan
from ..schedule.round_robin import RoundRobin, Stage
from ..schedule.simulation import Simulation, StageLoad
from ..schedule.simulation import simulate as simulate_schedule
from .hardware import Hardware
from .layer_footprint import LayerFootprint
from .memory_estimate import DeviceMemory, HostMemory
from .step_plan import StepPlan, step_plan
from .step_simulation import DiskUse, StepSimulation, machine_of, simulate

# Seconds for a stage without matrix products: a small value that orders the plan but does not change sums.
_NEXT_TO_NOTHING = 1e-7


@dataclasses.dataclass(frozen=True, slots=True)
class PlanReport:
    step: StepPlan  # the training step, whatever machine runs it
    simulated: StepSimulation  # the step on the devices and the host
    hardware: Hardware  # devices and host
    devices: list[int]  # device of each stage
    seconds: list[float]  # time of each stage on one microbatch
    # tokens per step above which forward stages compute for longer than their uploads take
    tokens_forward: float
    tokens_backward: float  # the same for backward stages
    # why the runtime cannot make a plan: one layer is too large. Then the plan is for devices without a limit. Else "".
    too_large: str
    least_memory: int  # bytes that a device must have for the runtime to make a plan

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
        keep = self.simulated.keep_parameters if keep_parameters is None else keep_parameters
        return simulate(
            step or self.step,
            self.hardware,
            is_async=is_async,
            stays=self.simulated.stays,
            keep_parameters=keep,
            host="memory" if self.disk is None else "disk",
        )

    @property
    def disk(self) -> DiskUse | None:
        """Bytes of a step on the disk; ``None`` if the training state is in host memory."""
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
    best = _fewest_copies(simulated, hardware.memory)
    step = steps[best]
    loads = simulated[best].loads
    forward = [load for stage, load in zip(step.stages, loads, strict=True) if stage.kind == "forward"]
    return PlanReport(
        step=step,
        simulated=simulated[best],
        hardware=hardware,
        devices=RoundRobin(len(hardware.names)).assign(len(loads)),
        seconds=[load.compute for load in loads],
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
    too_large = ""
    try:
        _plan(costs, hardware, limit, 1, num_microbatch)
    except PlanError as error:
        too_large, limit = str(error), None
    most = min(len(hardware.names), num_microbatch)
    numbers = range(1, most + 1) if last_stage_copies == "auto" else [last_stage_copies]
    return [_plan(costs, hardware, limit, number, num_microbatch) for number in numbers], too_large


def _plan(
    costs: list[LayerCost], hardware: Hardware, limit: float | None, copies: int, num_microbatch: int
) -> ModelExecutePlan:
    """Return the execution plan that the runtime makes from the given layer times."""
    found = ModelExecutePlan.auto(
        "fused",
        costs,
        min_stages=len(hardware.names),
        model_memory_limit=None if limit is None else limit / 1e9,
        last_stage_copies=copies,
        num_microbatch=None if copies == 1 else num_microbatch,
    )
    return cast(ModelExecutePlan, found)


def _fewest_copies(simulated: Sequence[StepSimulation], memory: int | None) -> int:
    """Return the index of the first simulated step that fits the memory and is about as fast as the fastest step."""
    peaks = [max(device.total for device in one.device_memory) for one in simulated]
    fitting = [number for number, peak in enumerate(peaks) if memory is None or peak <= memory] or [0]
    least = min(simulated[number].seconds for number in fitting)
    return next(number for number in fitting if simulated[number].seconds * (1 - CLEAR_GAIN) <= least)


def _tokens_to_hide(loads: Sequence[StageLoad], tokens: float, machine: Hardware) -> float:
    """Return the number of tokens per step for which computing takes as long as copying parameters and gradients.

    The compute time of a stage grows with the tokens; the time to copy parameters and gradients does not.
    """
    compute = sum(load.compute for load in loads)
    down = machine.down or machine.link
    copies = max(sum(load.upload for load in loads) / machine.link, sum(load.download for load in loads) / down)
    return tokens * copies / compute if compute else 0.0


# Estimate what a frozen reference model adds to a training step: weights on the host, and a forward before it.


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """Cost of a frozen reference model, which runs after the trained model and needs no further device memory."""

    host_bytes: int  # its weights on the host; 0 if it is the model without its adapters
    seconds: float  # its forward


def with_reference(
    report: PlanReport, tensors: Iterable[torch.Tensor], *, shares_weights: bool
) -> tuple[PlanReport, Reference]:
    """Add the cost of a frozen reference model of the same size to a report; return the report and the cost."""
    # tensors: parameters and buffers of the model; those of the reference have the same sizes
    # shares_weights: whether the reference is the model without its adapters
    size = 0 if shares_weights else sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    host = dataclasses.replace(report.host_memory, reference=size)
    simulated = dataclasses.replace(report.simulated, host_memory=host)
    found = dataclasses.replace(report, simulated=simulated)
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
    return found, Reference(size, run.time)
