"""Estimate the memory of a run on each device and on the host.

The memory of each layer is measured (:mod:`roundpipe_runtime.estimate.layer_footprint`) and added up in the order in
which a stage calls the layers.
"""

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
from typing import Literal, NamedTuple

import torch
from torch import nn

from ..device.composite import parts_of
from ..engine.planner import FOR_PARAMETERS, bytes_to_keep
from ..optim.parameters import Update
from ..optim.parts import LANDING
from ..schedule.round_robin import Stage
from .layer_footprint import LayerFootprint


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Peak memory of a device in bytes, by purpose.

    Attributes:
        stage: index of the stage in which the peak is reached.
        parameters: bytes of the stage's parameters, except parameters that stay on the device from step to step.
        gradients: bytes of the stage's summed gradients. If several devices run the last stage, they also have
            gradients of single microbatches, which one of the devices sums.
        activations: bytes of the activations of the current microbatch.
        staying: bytes of layers of earlier stages, which stay on the device until their backward.
        arriving: bytes of the parameters of the next stage, which are already being copied.
        copies: bytes of tensors of other microbatches that may be in transit.
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
        parameters: bytes of the model's parameters and buffers; the optimizer updates the parameters themselves unless
            ``update`` is ``"masters"``.
        gradients: bytes of the gradients of trainable parameters; with ``update="in_backward"``, of a few layers only.
        masters: bytes of the master weights, if the optimizer works in another dtype.
        optimizer: bytes of the state of Adam, two numbers per parameter.
        activations: bytes of the inputs of backward stages, and of tensors that are being copied, such as gradients
            that copies of the last stage send each other.
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
        trained = self.parameters + self.gradients + self.masters + self.optimizer
        return trained + self.activations + self.reference


def share_bytes(stage: Stage, layers: Sequence[LayerFootprint]) -> int:
    """Return the bytes of gradients that copies of a stage send each other per microbatch, in the parameters' dtype."""
    if stage.copies == 1:
        return 0
    return sum(min(layers[index].grad_bytes, layers[index].param_bytes) for index in stage.layers)


def visit_bytes(stage: Stage, layers: Sequence[LayerFootprint]) -> int:
    """Return the peak memory of one microbatch in a stage, without parameters and sums of gradients."""
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
        staying: set[int] = set()
        came: set[int] = set()
        moments = []
        for stage, following in zip(own, [*own[1:], None], strict=True):
            came |= set(stage.layers)
            on_device = [size.of(was_here=layer in came) for layer, size in enumerate(kept)]
            moments.append(_moment(stage, following, staying, on_device, layers, num_microbatch, prefetches))
            if stays:
                left = {layer for layer in stage.layers if not layers[layer].buffer_bytes}
                staying = staying | left if stage.kind == "forward" else staying - left
        found.append(max(moments, key=lambda moment: moment.total))
    return found


def _moment(
    stage: Stage,
    following: Stage | None,
    staying: set[int],
    kept: Sequence[int],
    layers: Sequence[LayerFootprint],
    num_microbatch: int,
    prefetches: bool,
) -> DeviceMemory:
    # staying: layers that wait on the device for their backward
    # kept: bytes of each layer that stay on the device from step to step
    goes_back = stage.kind != "forward"
    first, last = layers[stage.layers[0]], layers[stage.layers[-1]]
    arriving = copies = 0
    if prefetches:
        if following is not None:
            new = set(following.layers) - staying
            arriving = sum(layers[i].param_bytes - kept[i] for i in new)
        on_their_way = first.inputs + (last.grads_out + first.grads_in if goes_back else last.outputs)
        copies = (num_microbatch - 1) * on_their_way
    return DeviceMemory(
        stage=stage.index,
        parameters=sum(layers[i].param_bytes - kept[i] for i in stage.layers),
        gradients=_gradients(stage, layers, prefetches) if goes_back else 0,
        activations=visit_bytes(stage, layers),
        staying=sum(layers[i].param_bytes - kept[i] for i in staying.difference(stage.layers)),
        arriving=arriving,
        copies=copies,
        kept=sum(kept),
    )


def _gradients(stage: Stage, layers: Sequence[LayerFootprint], prefetches: bool) -> int:
    """Return the bytes of gradients on a device during a stage: their sums, and those of single microbatches."""
    # If several devices run copies of the last stage, the last copy adds the gradients: it holds those of its previous
    # microbatch and those that another device sent. The peak of a backward has only gradients of the current layer.
    sums = sum(layers[i].grad_bytes for i in stage.layers) if stage.is_last_copy else 0
    waiting = 2 if stage.is_last_copy else int(prefetches)
    return sums + (waiting + (len(stage.layers) > 1)) * share_bytes(stage, layers)


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
        optimizer=sum(2 * p.numel() * dtype.itemsize for p, dtype in wide),
        activations=num_microbatch * (sum(layers[index].inputs for index in restarts) + between) + sent,
    )


# Choose the bytes of each layer that stay on a device between steps (``keep_parameters``).


class KeptBytes(NamedTuple):
    """Bytes of a layer's parameters that stay on each device after a stage has ended."""

    frozen: int  # bytes of parameters that do not train. They are on the device before the step begins.
    trained: int  # bytes of parameters that train. They stay from the first stage of a step that needs them to its end.

    def of(self, *, was_here: bool) -> int:
        """Return the bytes of the layer that are on a device before a stage copies parameters there."""
        return self.frozen + (self.trained if was_here else 0)


def kept_bytes(layers: Sequence[LayerFootprint], room: float) -> list[KeptBytes]:
    """Return how many bytes of each layer's parameters fit into ``room`` bytes of a device, frozen parameters first.

    >>> layer = LayerFootprint("", 300, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, frozen_bytes=250, trained_bytes=50)
    >>> [tuple(kept) for kept in kept_bytes([layer, layer], 520)]
    [(250, 20), (250, 0)]
    """
    frozen, room = _filled([layer.frozen_bytes for layer in layers], room)
    trained, _ = _filled([layer.trained_bytes for layer in layers], room)
    return [KeptBytes(*sizes) for sizes in zip(frozen, trained, strict=True)]


def room_to_keep(
    wanted: float | Literal["auto"],
    stages: Sequence[Stage],
    layers: Sequence[LayerFootprint],
    memory: int | None,
    *,
    fits: bool,
) -> float:
    """Return the bytes of parameters that may stay on each device, by the same rule as the runtime."""
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


def _filled(sizes: Sequence[int], room: float) -> tuple[list[int], float]:
    """Return how many bytes of each item fit into ``room`` bytes if items are placed in order, and the bytes left."""
    found = []
    for size in sizes:
        here = size if size <= room else int(room)
        found.append(here)
        room -= here
    return found, room


# Estimate the memory of a loss that is computed once for the whole batch, with the last layer.


@dataclasses.dataclass(frozen=True, slots=True)
class JoinedLoss:
    """Memory of a loss that is computed once for the whole batch, in bytes."""

    device: int  # peak memory of the device that runs the last layer for the whole batch
    host: int  # memory of the host in addition to that of a run in microbatches


def joined_loss(last: LayerFootprint) -> JoinedLoss:
    # last: the last layer, measured on the whole batch
    visit = visit_bytes(Stage(0, "backward", range(1)), [last])
    return JoinedLoss(last.param_bytes + last.grad_bytes + visit, 2 * last.inputs + last.grads_in)
