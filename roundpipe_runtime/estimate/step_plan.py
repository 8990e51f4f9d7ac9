"""Describe a training step independently of the machine: stages, layers, and traffic of the optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from ..optim.parameters import Update
from ..schedule.costs import LayerCost
from ..schedule.plan import ModelExecutePlan
from ..schedule.round_robin import Kind, RoundRobin, Stage
from ..schedule.simulation import StageLoad
from .hardware import Hardware
from .layer_footprint import LayerFootprint
from .memory_estimate import HostMemory, host_memory, kept_bytes, share_bytes

# Share of a stage in the host's time per layer and step; a forward, a recomputation and a backward are a third each.
_SHARE: dict[Kind, float] = {"forward": 1 / 3, "fused": 2 / 3, "backward": 2 / 3}


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """The costs of a training step that do not depend on the machine: stages, memory, operations and bytes to copy.

    Attributes:
        plan: layers of each stage.
        layers: memory and operations of each layer on one microbatch.
        num_microbatch: number of microbatches.
        tokens: number of tokens in a step, over all microbatches; number of samples if the inputs are not text.
        host_memory: host memory that the training needs, by purpose.
        optimizer_bytes: bytes that AdamW reads and writes in a step.
        measured: seconds of each layer on one microbatch, as a pipeline measured them on the machine itself (default:
            ``None``, the seconds are computed from the operations).
        update: what the optimizer updates, and when, as in ``RoundPipe`` (default: ``"masters"``).
        least_host: bytes of host memory that the training needs with ``update="in_backward"`` (default: 0).
    """

    plan: ModelExecutePlan
    layers: Sequence[LayerFootprint]
    num_microbatch: int
    tokens: int
    host_memory: HostMemory
    optimizer_bytes: int
    measured: Sequence[LayerCost] | None = None
    update: Update = "masters"
    least_host: int = 0

    @property
    def expert_bytes(self) -> tuple[int, int]:
        """Bytes of all experts of the model, and the bytes of experts that one pass is expected to copy to devices.

        The estimate assumes that tokens are routed evenly, and that devices have memory for all experts of a stage.
        """
        whole = sum(layer.expert_bytes for layer in self.layers)
        unread = sum(unread_bytes(layer, self.tokens, self.num_microbatch)[0] for layer in self.layers)
        return whole, round(whole - unread)

    @property
    def stages(self) -> list[Stage]:
        """The stages of the step, in the order in which they are dispatched to devices."""
        return self.plan.stages("fused", len(self.layers), most_copies=self.num_microbatch)

    def on(self, num_devices: int) -> StepPlan:
        """Return this step for ``num_devices`` devices: the last stage has at most as many copies as there are devices.

        Args:
            num_devices: number of devices.
        """
        if self.plan.last_stage_copies <= num_devices:
            return self
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, last_stage_copies=num_devices))

    def share_bytes(self, stage: Stage) -> int:
        """Return the bytes of gradients that a copy of the stage sends to the last copy, per microbatch.

        Args:
            stage: stage of this plan.
        """
        return share_bytes(stage, self.layers)

    def part_bytes(self, stage: Stage) -> tuple[int, int]:
        """Return the bytes of embedding rows and head slices that a microbatch uploads, and of downloaded gradients.

        Args:
            stage: stage of this plan.
        """
        goes_back = stage.kind != "forward"
        layers = [self.layers[index] for index in stage.layers]
        up = sum(layer.parts_forward + (layer.parts_backward if goes_back else 0) for layer in layers)
        return up, sum(layer.parts_down for layer in layers) if goes_back else 0

    def seconds(self, stage: Stage, machine: Hardware) -> float:
        """Return the time of a stage on one microbatch, in seconds.

        Args:
            stage: stage of this plan.
            machine: devices and host.

        Returns:
            The seconds, including the time in which the host calls the layers. Only accelerators compute during the
            calls.
        """
        called = len(stage.layers) * _SHARE[stage.kind] * machine.call
        computed = sum(self._seconds(layer, stage.kind, machine) for layer in stage.layers)
        return computed + called if machine.is_virtual else max(computed, called)

    def _seconds(self, layer: int, kind: Kind, machine: Hardware) -> float:
        if self.measured is not None:
            return self.measured[layer].forward if kind == "forward" else self.measured[layer].backward
        found = self.layers[layer]
        return (found.forward_flops + (found.backward_flops if kind != "forward" else 0)) / machine.flops


def step_plan(
    plan: ModelExecutePlan,
    layers: Sequence[LayerFootprint],
    model: nn.Module,
    *,
    num_microbatch: int,
    tokens: int,
    optim_dtype: torch.dtype | None = None,
    measured: Sequence[LayerCost] | None = None,
    update: Update = "masters",
) -> StepPlan:
    """Describe the stages, memory and operations of a training step of a model.

    Args:
        plan: execution plan of a ``"fused"`` run, with the layers of each stage.
        layers: memory and operations of each layer on one microbatch, as :func:`measure_layers` returns them.
        model: model that is trained; its parameters are in host memory or on ``meta``.
        num_microbatch: number of microbatches.
        tokens: number of tokens in all microbatches of a step.
        optim_dtype: dtype in which the optimizer works (default: the dtype of each parameter).
        measured: seconds of each layer, as ``RoundPipe.layer_costs()`` returns them after some steps (default: computed
            from the operations).
        update: what the optimizer updates, and when, as in ``RoundPipe`` (default: ``"masters"``).

    Returns:
        The description.

    Raises:
        PlanError: ``plan`` does not match ``layers``.
    """
    parameters = list({id(p): p for p in model.parameters()}.values())
    stages = plan.stages("fused", len(layers), most_copies=num_microbatch)
    known = partial(
        host_memory, parameters, list(model.buffers()), stages, layers, num_microbatch, optim_dtype=optim_dtype
    )
    host, least = known(update=update), known(update="in_backward").total
    # AdamW reads 4 values for each parameter, writes 3, and rounds master weights for the model
    rounded = sum(p.nbytes for p in parameters if p.requires_grad) if host.masters else 0
    of_adam = 7 * host.optimizer // 2 + host.masters + rounded
    return StepPlan(plan, layers, num_microbatch, tokens, host, of_adam, measured, update, least)


def stage_loads(plan: StepPlan, machine: Hardware, *, stays: bool, room_to_keep: float = 0.0) -> list[StageLoad]:
    """Return compute time and copied bytes of each stage; parameters that stay on a device are not copied again."""
    # room_to_keep: bytes of each device for parameters that stay between steps. Default: 0.
    there: set[tuple[int, int]] = set()
    came: set[tuple[int, int]] = set()
    kept = kept_bytes(plan.layers, room_to_keep)
    unread = [unread_bytes(layer, plan.tokens, plan.num_microbatch) for layer in plan.layers]
    loads = []
    plan = plan.on(len(machine.names))
    stages = plan.stages
    restarts = {stage.layers[0] for stage in stages if stage.kind == "backward"}
    for stage, device in zip(stages, RoundRobin(len(machine.names)).assign(len(stages)), strict=True):
        mine = [plan.layers[index] for index in stage.layers]
        goes_back = stage.kind != "forward"
        # inputs of backward stages are copied back, except those that came from the host
        saved = [] if goes_back else [plan.layers[i].inputs for i in stage.layers[1:] if i in restarts]
        new = [index for index in stage.layers if (device, index) not in there]
        if stays and stage.kind == "forward":
            there.update((device, index) for index in stage.layers if not plan.layers[index].buffer_bytes)
        stayed = {index: kept[index].of(was_here=(device, index) in came) for index in new}
        upload = sum(
            max(0, int(plan.layers[i].param_bytes - plan.layers[i].slice_bytes - stayed[i] - unread[i][0])) for i in new
        )
        up, down = plan.part_bytes(stage)
        came.update((device, index) for index in stage.layers)
        loads.append(
            StageLoad(
                compute=plan.seconds(stage, machine),
                upload=upload,
                download=sum(int(plan.layers[i].grad_bytes - unread[i][1]) for i in stage.layers) if goes_back else 0,
                inputs=mine[0].inputs + (mine[-1].grads_out if stage.kind == "backward" else 0) + up,
                outputs=(mine[0].grads_in if goes_back else mine[-1].outputs + sum(saved)) + down,
                copies=stage.copies,
                copy=stage.copy,
                share=plan.share_bytes(stage),
            )
        )
    return loads


# Estimate how many experts of a mixture a step uploads: the experts with at least one token.


# The share of the experts up to which the runtime uploads them on demand, as `engine/parameters/partial_table` has it.
MOST_READ = 0.75


def expected_share(experts: int, per_token: float, tokens: float) -> float:
    """Return the expected share of a layer's experts that tokens are routed to, if routing is even.

    Uneven routing reaches fewer experts on average, so the result is an upper bound of the average share. A single
    batch may reach more experts than expected.

    Args:
        experts: number of experts of the layer.
        per_token: number of different experts that each token is routed to.
        tokens: number of tokens.

    Returns:
        The expected share of the layer's experts, from 0 to 1.

    >>> expected_share(8, 2, 1), round(expected_share(8, 2, 4), 2), round(expected_share(128, 8, 16), 2)
    (0.25, 0.68, 0.64)
    """
    return 1.0 - (1.0 - min(per_token / experts, 1.0)) ** tokens if experts else 1.0


def unread_bytes(layer: LayerFootprint, tokens: int, num_microbatch: int) -> tuple[float, float]:
    """Return the expected bytes of a layer's experts that a step does not upload, and the bytes of their gradients."""
    # tokens: tokens of the step, all microbatches
    if not (layer.experts and tokens):
        return 0.0, 0.0
    share = expected_share(layer.experts, layer.routed_rows * num_microbatch / tokens, tokens)
    if share > MOST_READ:  # then the runtime uploads all experts ahead
        return 0.0, 0.0
    unread = (1.0 - share) * layer.expert_bytes
    # frozen experts have no gradients; trained ones are assumed to have the dtype of the other gradients
    trained = min(layer.trained_bytes, layer.expert_bytes)
    wide = layer.grad_bytes / layer.trained_bytes if layer.trained_bytes else 0.0
    return unread, (1.0 - share) * trained * wide if layer.experts_train else 0.0
