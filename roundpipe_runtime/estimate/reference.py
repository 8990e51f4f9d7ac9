"""Estimate what a frozen reference model adds to a training step: weights on the host, and a forward before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from ..schedule.round_robin import Stage
from ..schedule.simulation import StageLoad
from ..schedule.simulation import simulate as simulate_schedule
from .report import PlanReport
from .step_simulation import machine_of


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """What a reference model adds to a step, whose stages run after its own: devices need no more memory for it."""

    host_bytes: int  # its weights on the host; 0 where it is the model itself without its adapters
    seconds: float  # its forward


def with_reference(
    report: PlanReport, tensors: Iterable[torch.Tensor], *, shares_weights: bool
) -> tuple[PlanReport, Reference]:
    """Return a plan whose host also holds a reference of the same size, and what that adds to a step."""
    # tensors: parameters and buffers of the model, which those of the reference equal in size
    # shares_weights: whether the reference is the model without its adapters
    size = 0 if shares_weights else sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    host = dataclasses.replace(report.host_memory, reference=size)
    simulated = dataclasses.replace(report.simulated, host_memory=host)
    found = dataclasses.replace(report, simulated=simulated)
    return found, Reference(size, _seconds_of_forward(report))


def _seconds_of_forward(report: PlanReport) -> float:
    """Seconds of a run that goes forward through all layers, in the stages of the training."""
    groups = [*report.plan.fwd_plan, report.plan.bwd_plan[0]]
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
    return simulate_schedule(loads, machine_of(report.hardware, linked=True), report.num_microbatch).time
