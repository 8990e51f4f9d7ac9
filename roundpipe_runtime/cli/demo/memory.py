"""Count the memory that a device needs for training, with and without a pipeline.

A virtual device refuses copies beyond its limit. The devices here also count what is computed on them, so that the
numbers are those of a device with memory of its own; that takes time, so they are for a few steps and not for a clock.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...device.events import Event
from ...device.virtual import VirtualDevice
from ...engine.config import RoundPipeRunConfig
from ...errors import DeviceMemoryError
from ...estimate.footprint import Footprint, storage_bytes
from ...optim.adam import Adam
from ...pipeline import RoundPipe

_Batch = tuple[torch.Tensor, torch.Tensor]
_LossFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """The most bytes that a device held."""

    weights: int  # the weights of the model
    plain: int  # where the device holds weights, gradients, what Adam remembers and all activations
    refusal: str  # the message of a device with the limit that is to hold that
    pipeline: int  # the most that one of the devices of the pipeline held, each of which has the limit


class CountingDevice(VirtualDevice):
    """A virtual device whose limit is for all that is there: copies, activations, gradients, what operations need."""

    def __init__(self, name: str, limit: int | None = None) -> None:
        super().__init__(name, memory_limit=limit)
        self.footprint = _LimitedFootprint(self)

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory of the device, and count it."""
        tensor = super().allocate(like)
        self.footprint.count(tensor)
        return tensor

    def computing(self, after: Event | None = None) -> contextlib.AbstractContextManager[Any]:
        """Count what is made in the block."""
        return self.footprint


class _LimitedFootprint(Footprint):
    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self.device = device

    def _note(self, tensor: torch.Tensor, *, counted: bool) -> None:
        before = self.alive
        super()._note(tensor, counted=counted)
        size, limit = self.alive - before, self.device.memory_limit
        if limit is not None and size and self.alive > limit:
            raise DeviceMemoryError(
                f"{self.device.name} is out of memory: it holds {before} of {limit} bytes, "
                f"and {size} more were asked for ({tuple(tensor.shape)}, {tensor.dtype})."
            )


def measure_needs(model: nn.Module, batches: Sequence[_Batch], loss_fn: _LossFn, limit: int, devices: int) -> Needs:
    """Train copies of a model on devices that count."""
    # batches: inputs and labels of each step. The second step has Adam's state in addition to the activations.
    # limit: bytes of a device, which the pipeline keeps and plain training does not
    roomy = CountingDevice("a device with room")
    _train_plainly(model, batches, loss_fn, roomy)
    refusal = ""
    try:
        _train_plainly(model, batches, loss_fn, CountingDevice("the device", limit))
    except DeviceMemoryError as error:
        refusal = str(error)
    small = [CountingDevice(f"virtual:{index}", limit) for index in range(devices)]
    config = RoundPipeRunConfig(loss_reduction="mean")
    with contextlib.closing(RoundPipe(copy.deepcopy(model), devices=small, model_run_config=config)) as pipeline:
        optimizer = Adam(pipeline.optim_parameters())
        for inputs, labels in batches:
            pipeline.forward_backward((inputs,), label=labels, loss_fn=loss_fn)
            pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    return Needs(
        weights=storage_bytes(model.parameters()),
        plain=roomy.footprint.peak,
        refusal=refusal,
        pipeline=max(device.footprint.peak for device in small),
    )


def _train_plainly(model: nn.Module, batches: Sequence[_Batch], loss_fn: _LossFn, device: CountingDevice) -> None:
    """What plain PyTorch does: the model goes to the device, and stays there with all that its training needs."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = device.copy_in(parameter.data)
    optimizer = Adam(model.parameters())
    for inputs, labels in batches:
        inputs, labels = device.copy_in(inputs), device.copy_in(labels)
        with device.computing():
            loss_fn(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
