"""Describe a training step: its stages, its layers, the traffic of the optimizer, and the memory that it needs."""

# a device, while stage k computes                       the host
#   parameters of stage k                                  parameters and buffers
#   parameters that stay from step to step
#   sums of their gradients          (backward, fused)     gradients, master weights, optimizer state
#   peak of the activations of a microbatch                inputs of backward stages, of all microbatches
#   an accelerator also:                                   tensors in transit between stages
#     parameters of the next stage, in transit
#     copies of other microbatches, in transit

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import nn

from ..device.composite import parts_of
from ..engine.parameters.partial_table import MOST_READ
from ..engine.planner import FOR_PARAMETERS, bytes_to_keep
from ..optim.parameters import Update
from ..optim.parts import LANDING
from ..schedule.partitioning import LayerCost
from ..schedule.plan import ModelExecutePlan
from ..schedule.round_robin import Kind, RoundRobin, Stage
from ..schedule.simulation import StageLoad
from .footprint import LayerFootprint
from .hardware import Hardware

# Share of a stage in the host's time per layer and step; a forward, a recomputation and a backward are a third each.
_SHARE: dict[Kind, float] = {"forward": 1 / 3, "fused": 2 / 3, "backward": 2 / 3}


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Peak memory of a device in bytes, by purpose.

    Attributes:
        stage: index of the stage in which the peak is reached.
        parameters: bytes of the stage's parameters, except parameters that stay on the device from step to step.
        gradients: bytes of the stage's summed gradients. If several devices run the last stage, this includes the
            gradients of single microbatches that are not added to the sums yet.
        activations: bytes of the activations of the current microbatch.
        staying: bytes of layers of earlier stages, which stay on the device until their backward.
        arriving: bytes of the parameters of the next stage, which are already being copied.
        copies: bytes of tensors of other microbatches, which may be on the device while they are copied to or from it.
        kept: bytes of parameters that stay from step to step, see ``keep_parameters`` (default: 0).
    """

    stage: int
    parameters: int
    gradients: int
    activations: int
    staying: int
    arriving: int
    copies: int
    kept: int = 0

    @property
    def total(self) -> int:
        """The peak memory of a device: the sum over all purposes, in bytes."""
        of_stage = self.parameters + self.gradients + self.activations
        return of_stage + self.staying + self.arriving + self.copies + self.kept


@dataclasses.dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of the host in bytes, by purpose.

    Attributes:
        parameters: bytes of the model's parameters and buffers. Unless ``update`` is ``"masters"``, trainable
            parameters are stored in the dtype of the optimizer, which updates these parameters directly.
        gradients: bytes of the gradients of trainable parameters. With ``update="in_backward"``, only the gradients of
            the few layers whose gradients are in memory at the same time are counted.
        masters: bytes of the master weights, if the optimizer works in another dtype.
        optimizer: bytes of the state of Adam, two numbers per parameter.
        activations: bytes of the inputs of backward stages, and of tensors that are sent between devices. If several
            devices run the last stage, these tensors include its gradients.
        reference: bytes of the weights of a frozen reference model (default: 0).
    """

    parameters: int
    gradients: int
    masters: int
    optimizer: int
    activations: int
    reference: int = 0

    @property
    def total(self) -> int:
        """The memory of the host: the sum over all purposes, in bytes."""
        return sum(dataclasses.astuple(self))


def share_bytes(stage: Stage, layers: Sequence[LayerFootprint]) -> int:
    """Return how many bytes of gradients per microbatch a device sends to the device that sums them."""
    if stage.copies == 1:
        return 0
    return sum(min(layers[index].grad_bytes, layers[index].param_bytes) for index in stage.layers)


def visit_bytes(stage: Stage, layers: Sequence[LayerFootprint]) -> int:
    """Return the peak memory that a stage needs for one microbatch, without parameters and summed gradients."""
    mine = [layers[index] for index in stage.layers]
    if stage.kind == "forward":
        # the graph of a layer is freed before the next one begins
        return max(layer.inputs + layer.forward_peak for layer in mine)
    arrived = mine[0].inputs + (mine[-1].grads_out if stage.kind == "backward" else 0)
    peak, held = 0, arrived
    for layer in mine:
        peak = max(peak, held + layer.forward_peak)
        held += layer.held
    for layer in reversed(mine):
        held -= layer.held
        peak = max(peak, held + layer.grads_out + layer.backward_peak)
    return peak


def device_memory(
    stages: Sequence[Stage],
    devices: Sequence[int],
    layers: Sequence[LayerFootprint],
    num_microbatch: int,
    *,
    stays: bool,
    prefetches: bool,
    room_to_keep: float = 0.0,
) -> list[DeviceMemory]:
    # prefetches: whether a stage is loaded while the previous stage computes; false for virtual devices
    # room_to_keep: bytes of each device for parameters that stay between steps. Default: 0.
    found = []
    kept = kept_bytes(layers, room_to_keep)
    for device in sorted(set(devices)):
        own = [stage for stage, where in zip(stages, devices, strict=True) if where == device]
        staying: set[int] = set()  # layers that wait on the device for their backward
        came: set[int] = set()
        moments = []
        for stage, following in zip(own, [*own[1:], None], strict=True):
            came |= set(stage.layers)
            # bytes of each layer that stay on the device from step to step, and bytes that are copied there
            here = [size.of(was_here=layer in came) for layer, size in enumerate(kept)]
            copied = [layer.param_bytes - on_device for layer, on_device in zip(layers, here, strict=True)]
            goes_back, gradients, arriving, copies = stage.kind != "forward", 0, 0, 0
            if goes_back:
                # If several devices run copies of the last stage, the last copy adds the gradients: it holds those of
                # its previous microbatch and those that another device sent. The peak of a backward has only gradients
                # of the current layer.
                waiting = 2 if stage.is_last_copy else int(prefetches)
                gradients = sum(layers[i].grad_bytes for i in stage.layers) if stage.is_last_copy else 0
                gradients += (waiting + (len(stage.layers) > 1)) * share_bytes(stage, layers)
            if prefetches:
                arriving = 0 if following is None else sum(copied[i] for i in set(following.layers) - staying)
                first, last = layers[stage.layers[0]], layers[stage.layers[-1]]
                on_their_way = first.inputs + (last.grads_out + first.grads_in if goes_back else last.outputs)
                copies = (num_microbatch - 1) * on_their_way
            moment = DeviceMemory(
                stage=stage.index,
                parameters=sum(copied[i] for i in stage.layers),
                gradients=gradients,
                activations=visit_bytes(stage, layers),
                staying=sum(copied[i] for i in staying.difference(stage.layers)),
                arriving=arriving,
                copies=copies,
                kept=sum(here),
            )
            moments.append(moment)
            if stays:
                left = {layer for layer in stage.layers if not layers[layer].buffer_bytes}
                staying = staying | left if stage.kind == "forward" else staying - left
        found.append(max(moments, key=lambda moment: moment.total))
    return found


def host_memory(
    parameters: Iterable[nn.Parameter],
    buffers: Iterable[torch.Tensor],
    stages: Sequence[Stage],
    layers: Sequence[LayerFootprint],
    num_microbatch: int,
    *,
    optim_dtype: torch.dtype | None = None,
    gradient_dtype: torch.dtype | None = None,
    update: Update = "masters",
) -> HostMemory:
    # parameters: the parameters of the model, each once
    # optim_dtype: dtype of the optimizer. Default: the dtype of each parameter.
    # gradient_dtype, update: as in `RoundPipe`. Default: the dtype of the optimizer, and `"masters"`.
    params = list(parameters)
    trained = [p for p in params if p.requires_grad]
    wide = [(p, optim_dtype or p.dtype) for p in trained]
    restarts = [stage.layers[0] for stage in stages if stage.kind == "backward"]
    # the other copies of the last stage may send all gradients before the last copy adds them
    sent = sum(len(s.microbatches(num_microbatch)) * share_bytes(s, layers) for s in stages if not s.is_last_copy)
    between = max((layers[stage.layers[-1]].outputs for stage in stages if stage.kind == "forward"), default=0)
    masters = sum(p.numel() * dtype.itemsize for p, dtype in wide if dtype != p.dtype)
    kept = sum(t.numel() * t.element_size() for t in [*parts_of(params), *buffers])
    gradients = sum(p.numel() * (gradient_dtype or dtype).itemsize for p, dtype in wide)
    if update != "masters":
        kept += masters - sum(p.nbytes for p, dtype in wide if dtype != p.dtype)
        masters = 0
    if update == "in_backward":
        landing = [layer.grad_bytes + layer.table_grad_bytes for layer in layers]
        gradients = min(gradients, max((sum(landing[i : i + LANDING + 1]) for i in range(len(landing))), default=0))
    return HostMemory(
        parameters=kept,
        gradients=gradients,
        masters=masters,
        optimizer=2 * sum(p.numel() * dtype.itemsize for p, dtype in wide),
        activations=num_microbatch * (sum(layers[index].inputs for index in restarts) + between) + sent,
    )


class KeptBytes(NamedTuple):
    """Bytes of a layer's parameters that stay on each device after a stage has ended (``keep_parameters``)."""

    frozen: int  # bytes of parameters that do not train. They are on the device before the step begins.
    trained: int  # bytes of parameters that train. They stay from the first stage of a step that needs them to its end.

    def of(self, *, was_here: bool) -> int:
        """Return the bytes of the layer's parameters that are already on a device when a stage begins."""
        return self.frozen + (self.trained if was_here else 0)


def kept_bytes(layers: Sequence[LayerFootprint], room: float) -> list[KeptBytes]:
    """Return how many bytes of each layer's parameters can stay on a device that has ``room`` bytes for them.

    >>> layer = LayerFootprint("", 300, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, frozen_bytes=250, trained_bytes=50)
    >>> [tuple(kept) for kept in kept_bytes([layer, layer], 520)]
    [(250, 20), (250, 0)]
    """
    sizes = [layer.frozen_bytes for layer in layers] + [layer.trained_bytes for layer in layers]  # frozen first
    found = []
    for size in sizes:
        found.append(size if size <= room else int(room))
        room -= found[-1]
    return [KeptBytes(*both) for both in zip(found[: len(layers)], found[len(layers) :], strict=True)]


def room_to_keep(
    wanted: float | Literal["auto"],
    stages: Sequence[Stage],
    layers: Sequence[LayerFootprint],
    memory: int | None,
    *,
    fits: bool,
) -> float:
    """Return how many bytes of parameters may stay on each device from step to step (``keep_parameters``)."""
    # wanted: `keep_parameters` of `RoundPipeRunConfig`
    # memory: bytes of a device, `None` if not known
    # fits: whether there is room for all parameters and gradients at once
    if wanted != "auto":
        return wanted * 1e9
    largest = 0
    for stage in stages:
        sets = 0 if stage.kind == "forward" else stage.gradient_sets
        largest = max(largest, sum(layers[i].param_bytes + sets * layers[i].trained_bytes for i in stage.layers))
    return bytes_to_keep(None if memory is None else FOR_PARAMETERS * memory, largest, fits=fits)


class JoinedLoss(NamedTuple):
    """Memory, in bytes, that a loss needs if it is computed once for the whole batch."""

    device: int  # peak memory of the device that runs the last layer for the whole batch
    host: int  # memory of the host in addition to that of a run in microbatches


def joined_loss(last: LayerFootprint) -> JoinedLoss:
    # last: the last layer, measured on the whole batch
    visit = visit_bytes(Stage(0, "backward", range(1)), [last])
    return JoinedLoss(last.param_bytes + last.grad_bytes + visit, 2 * last.inputs + last.grads_in)


# -- the step, whatever machine runs it ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """The costs of a training step that do not depend on the machine: stages, memory, operations and bytes to copy.

    Attributes:
        plan: the execution plan, with the layers of each stage.
        layers: memory and operations of each layer on one microbatch.
        num_microbatch: number of microbatches.
        tokens: number of tokens in a step, over all microbatches; number of samples if the inputs are not text.
        host_memory: host memory that the training needs, by purpose.
        optimizer_bytes: bytes that AdamW reads and writes in a step.
        measured: seconds of each layer on one microbatch, measured by a pipeline on the machine. With ``None``
            (default), the seconds are computed from the number of operations.
        update: value of ``RoundPipe``'s argument ``update``: what the optimizer updates, and when (default:
            ``"masters"``).
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
        """Bytes of all experts of the model, and expected bytes of the experts that a step's forward copies to devices.

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
        """Return this training step, changed so that at most ``num_devices`` devices run the last stage.

        Args:
            num_devices: number of devices.
        """
        if self.plan.last_stage_copies <= num_devices:
            return self
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, last_stage_copies=num_devices))

    def share_bytes(self, stage: Stage) -> int:
        """Return how many bytes of gradients per microbatch a device sends to the device that sums them.

        Args:
            stage: stage of this plan.
        """
        return share_bytes(stage, self.layers)

    def part_bytes(self, stage: Stage) -> tuple[int, int]:
        """Return bytes per microbatch: embedding rows and head slices to upload, and their gradients to download.

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
            The time of the computation, or the time in which the host calls the layers, whichever is longer. For
            virtual devices, the sum of the two times, because virtual devices compute on the host.
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
        update: value of ``RoundPipe``'s argument ``update``: what the optimizer updates, and when (default:
            ``"masters"``).

    Returns:
        The description.

    Raises:
        PlanError: ``plan`` does not match ``layers``.
    """
    parameters, buffers = list({id(p): p for p in model.parameters()}.values()), list(model.buffers())
    stages = plan.stages("fused", len(layers), most_copies=num_microbatch)
    known = partial(host_memory, parameters, buffers, stages, layers, num_microbatch, optim_dtype=optim_dtype)
    host, least = known(update=update), known(update="in_backward").total
    # AdamW reads 4 values for each parameter, writes 3, and rounds master weights for the model
    rounded = sum(p.nbytes for p in parameters if p.requires_grad) if host.masters else 0
    of_adam = 7 * host.optimizer // 2 + host.masters + rounded
    return StepPlan(plan, layers, num_microbatch, tokens, host, of_adam, measured, update, least)


def stage_loads(plan: StepPlan, machine: Hardware, *, stays: bool, room_to_keep: float = 0.0) -> list[StageLoad]:
    """Return the compute time and the copied bytes of each stage."""
    # room_to_keep: bytes of each device for parameters that stay between steps. Default: 0.
    there: set[tuple[int, int]] = set()
    came: set[tuple[int, int]] = set()
    plan, layers = plan.on(len(machine.names)), plan.layers
    kept = kept_bytes(layers, room_to_keep)
    unread = [unread_bytes(layer, plan.tokens, plan.num_microbatch) for layer in layers]
    loads, stages = [], plan.stages
    restarts = {stage.layers[0] for stage in stages if stage.kind == "backward"}
    for stage, device in zip(stages, RoundRobin(len(machine.names)).assign(len(stages)), strict=True):
        mine = [layers[index] for index in stage.layers]
        goes_back = stage.kind != "forward"
        # inputs of backward stages are copied back, except those that came from the host
        saved = [] if goes_back else [layers[i].inputs for i in stage.layers[1:] if i in restarts]
        upload = 0
        for i in stage.layers:
            if (device, i) not in there:
                stayed = layers[i].slice_bytes + kept[i].of(was_here=(device, i) in came)
                upload += max(0, int(layers[i].param_bytes - stayed - unread[i][0]))
        if stays and not goes_back:
            there.update((device, index) for index in stage.layers if not layers[index].buffer_bytes)
        up, down = plan.part_bytes(stage)
        came.update((device, index) for index in stage.layers)
        loads.append(
            StageLoad(
                compute=plan.seconds(stage, machine),
                upload=upload,
                download=sum(int(layers[i].grad_bytes - unread[i][1]) for i in stage.layers) if goes_back else 0,
                inputs=mine[0].inputs + (mine[-1].grads_out if stage.kind == "backward" else 0) + up,
                outputs=(mine[0].grads_in if goes_back else mine[-1].outputs + sum(saved)) + down,
                copies=stage.copies,
                copy=stage.copy,
                share=plan.share_bytes(stage),
            )
        )
    return loads


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
    """Return the expected bytes of a layer that are not copied: experts without tokens, and gradients of these."""
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
