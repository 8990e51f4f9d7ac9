"""Report the memory and the step time of a training before anything is allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from ..engine.planner import FOR_PARAMETERS
from ..errors import PlanError
from ..schedule.costs import LayerCost, analytic_cost
from ..schedule.plan import ModelExecutePlan
from ..schedule.round_robin import RoundRobin, Stage
from ..schedule.simulation import Machine, Simulation, StageLoad, simulate
from .hardware import Hardware
from .layer_footprint import LayerFootprint
from .memory_estimate import DeviceMemory, HostMemory, device_memory, host_memory

__all__ = ["PlanReport", "plan_report"]

# Work of a stage that multiplies nothing, in seconds: an order for the plan, and nothing in the sum.
_NEXT_TO_NOTHING = 1e-7


@dataclasses.dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan with its memory and times.

    Attributes:
        layers: layers as measured on one microbatch.
        hardware: devices and host.
        num_microbatch: number of microbatches.
        tokens: number of tokens of a step, all microbatches.
        plan: plan that the runtime would choose.
        stages: stages in the order of dispatch.
        devices: device of each stage.
        seconds: time of each stage on one microbatch.
        stays: whether there is room for all layers, so that they stay from their forward to their backward.
        device_memory: peak memory of each device.
        host_memory: memory of the host.
        simulation: simulation of one iteration, with its transfers.
        unhindered: simulation of one iteration, if transfers took no time.
        tokens_forward: tokens of a step from which on the computation of forward stages takes as long as their uploads.
        tokens_backward: the same of the stages that go back.
        optimizer_seconds: time of AdamW's step on this host.
        too_large: why the runtime refuses to make a plan: a layer alone is too large. The plan then is one for devices
            without a limit. Else empty.
        least_memory: bytes that a device must have for the runtime to make a plan.
    """

    layers: list[LayerFootprint]
    hardware: Hardware
    num_microbatch: int
    tokens: int
    plan: ModelExecutePlan
    stages: list[Stage]
    devices: list[int]
    seconds: list[float]
    stays: bool
    device_memory: list[DeviceMemory]
    host_memory: HostMemory
    simulation: Simulation
    unhindered: Simulation
    tokens_forward: float
    tokens_backward: float
    optimizer_seconds: float
    too_large: str
    least_memory: int

    @property
    def fits_devices(self) -> bool | None:
        """Whether every device has the memory; ``None`` where it is not known how much it has."""
        if self.hardware.memory is None:
            return None
        return not self.too_large and max(m.total for m in self.device_memory) <= self.hardware.memory

    @property
    def fits_host(self) -> bool | None:
        """Whether the host has the memory; ``None`` where it is not known how much it has."""
        return None if self.hardware.host is None else self.host_memory.total <= self.hardware.host


def plan_report(
    model: nn.Module,
    pieces: Sequence[nn.Module],
    layers: Sequence[LayerFootprint],
    hardware: Hardware,
    *,
    num_microbatch: int,
    tokens: int,
    optim_dtype: torch.dtype | None = None,
) -> PlanReport:
    """Plan a training and estimate its memory and times.

    Args:
        model: the model whose parameters the host holds; they can be on ``meta``.
        pieces: the layers of the pipeline.
        layers: what each of them takes on one microbatch.
        hardware: the devices and the host.
        num_microbatch: number of microbatches.
        tokens: the number of tokens of a step, all microbatches together.
        optim_dtype: what the optimizer works in. Default: the dtype of each parameter.

    Returns:
        The plan, with its memory and times.
    """
    costs = [_cost(piece, layer, hardware.flops) for piece, layer in zip(pieces, layers, strict=True)]
    limit = None if hardware.memory is None else FOR_PARAMETERS * hardware.memory
    too_large = ""
    try:
        plan = _plan(costs, hardware, limit)
    except PlanError as error:
        too_large, plan = str(error), _plan(costs, hardware, None)
    stages = plan.stages("fused", len(layers))
    devices = RoundRobin(len(hardware.names)).assign(len(stages))
    stays = limit is None or sum(cost.param_bytes + cost.grad_bytes for cost in costs) <= limit
    loads = _loads(stages, devices, layers, hardware.flops, stays)
    parameters = list({id(p): p for p in model.parameters()}.values())
    host = host_memory(parameters, model.buffers(), stages, layers, num_microbatch, optim_dtype=optim_dtype)
    ahead = not hardware.is_virtual
    forward = [load for stage, load in zip(stages, loads, strict=True) if stage.kind == "forward"]
    return PlanReport(
        layers=list(layers),
        hardware=hardware,
        num_microbatch=num_microbatch,
        tokens=tokens,
        plan=plan,
        stages=stages,
        devices=devices,
        seconds=[load.compute for load in loads],
        stays=stays,
        device_memory=device_memory(stages, devices, layers, num_microbatch, stays=stays, prefetches=ahead),
        host_memory=host,
        simulation=simulate(loads, Machine(len(hardware.names), hardware.link), num_microbatch),
        unhindered=simulate(loads, Machine(len(hardware.names)), num_microbatch),
        tokens_forward=_tokens_to_hide(forward, tokens / num_microbatch, hardware.link),
        tokens_backward=_tokens_to_hide(loads[len(forward) :], tokens / num_microbatch, hardware.link),
        optimizer_seconds=_bytes_of_adam(host, parameters) / hardware.host_rate,
        too_large=too_large,
        # a stage gets half of what parameters may take, as the next one is loaded meanwhile
        least_memory=int(2 * max(cost.param_bytes + cost.grad_bytes for cost in costs) / FOR_PARAMETERS),
    )


def _plan(costs: list[LayerCost], hardware: Hardware, limit: float | None) -> ModelExecutePlan:
    """The plan that the runtime makes, once it has measured these times."""
    gigabytes = None if limit is None else limit / 1e9
    found = ModelExecutePlan.auto("fused", costs, min_stages=len(hardware.names), model_memory_limit=gigabytes)
    return cast(ModelExecutePlan, found)


def _cost(piece: nn.Module, layer: LayerFootprint, flops: float) -> LayerCost:
    """Time from operations; bytes as the runtime counts them when it makes a plan."""
    forward = layer.forward_flops / flops + _NEXT_TO_NOTHING
    return dataclasses.replace(
        analytic_cost(piece), forward=forward, backward=forward + layer.backward_flops / flops + _NEXT_TO_NOTHING
    )


def _loads(
    stages: Sequence[Stage], devices: Sequence[int], layers: Sequence[LayerFootprint], flops: float, stays: bool
) -> list[StageLoad]:
    """What each stage costs; a layer that stayed on its device is not copied there again."""
    there: set[tuple[int, int]] = set()
    loads = []
    for stage, device in zip(stages, devices, strict=True):
        mine = [layers[index] for index in stage.layers]
        goes_back = stage.kind != "forward"
        work = sum(layer.forward_flops + (layer.backward_flops if goes_back else 0) for layer in mine)
        new = [index for index in stage.layers if (device, index) not in there]
        if stays and stage.kind == "forward":
            there.update((device, index) for index in stage.layers)
        loads.append(
            StageLoad(
                compute=work / flops,
                upload=sum(layers[index].param_bytes for index in new),
                download=sum(layer.grad_bytes for layer in mine) if goes_back else 0,
                inputs=mine[0].inputs + (mine[-1].grads_out if stage.kind == "backward" else 0),
                outputs=mine[0].grads_in if goes_back else mine[-1].outputs,
            )
        )
    return loads


def _tokens_to_hide(loads: Sequence[StageLoad], tokens: float, link: float) -> float:
    """Tokens of a step with which computing takes as long as copying.

    The tokens of a step pass through a stage while it is on the device. So its time grows with them, and that of the
    copies of its parameters and gradients does not.

    Args:
        loads: the loads of the stages.
        tokens: the number of tokens of one microbatch.
        link: bytes per second, in each direction.
    """
    compute = sum(load.compute for load in loads)
    copies = max(sum(load.upload for load in loads), sum(load.download for load in loads)) / link
    return tokens * copies / compute if compute else 0.0


def _bytes_of_adam(host: HostMemory, parameters: Sequence[nn.Parameter]) -> int:
    """What AdamW reads and writes: parameter, gradient and two moments, and three of them again; then the model's."""
    rounded = sum(p.nbytes for p in parameters if p.requires_grad) if host.masters else 0
    return 7 * host.gradients + host.masters + rounded
