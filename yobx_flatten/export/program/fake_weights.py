"""Trace a module whose weights have no data, have it only while a layer is called, or were made in inference mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...huggingface.layer_weights import paused
from ...private_names.of_torch import FakeTensor, FakeTensorMode

__all__ = ["fake_weights"]


@contextlib.contextmanager
def fake_weights(module: torch.nn.Module, leaves: Iterable[Any]) -> Iterator[None]:
    """Put fake weights in the place of those on ``meta``, on the device of the inputs; nothing is brought meanwhile.

    A trace computes shapes only, and it refuses tensors of two devices. Where the inputs are also on ``meta``, those
    stay as they are. Parameters that were made in inference mode are traced as frozen ones, since a trace cannot state
    that they are learned.
    """
    # module: the module; afterwards it has its own tensors again
    with _frozen_if_of_inference(module), _without_meta(module, leaves):
        yield


@contextlib.contextmanager
def _frozen_if_of_inference(module: torch.nn.Module) -> Iterator[None]:
    learned = [one for one in module.parameters() if one.is_inference() and one.requires_grad]
    for parameter in learned:
        parameter.requires_grad = False
    try:
        yield
    finally:
        with torch.inference_mode():  # nowhere else is that allowed of such tensors
            for parameter in learned:
                parameter.requires_grad = True


@contextlib.contextmanager
def _without_meta(module: torch.nn.Module, leaves: Iterable[Any]) -> Iterator[None]:
    devices = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if devices and all(device.type == "meta" for device in devices):
        yield
        return
    device = next((device for device in devices if device.type != "meta"), torch.device("cpu"))
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (held, name, tensor)
        for owner in module.modules()
        for held in (owner._parameters, owner._buffers)
        for name, tensor in held.items()
        if tensor is not None and tensor.is_meta and not isinstance(tensor, FakeTensor)
    ]
    if not places:
        yield
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, torch.Tensor] = {}  # what is tied stays tied
    for held, name, tensor in places:
        if id(tensor) not in fakes:
            fakes[id(tensor)] = _fake(mode, tensor, device)
        held[name] = fakes[id(tensor)]
    try:
        with paused(module):
            yield
    finally:
        for held, name, tensor in places:
            held[name] = tensor


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made
