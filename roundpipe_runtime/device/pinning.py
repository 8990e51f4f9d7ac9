"""Pin parameters in host memory, from which a device copies directly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..errors import ConfigError, DeviceError
from .accelerator import AcceleratorDevice
from .virtual import Device

__all__ = ["pin_parameters"]


def pin_parameters(model: nn.Module, how: str, devices: Sequence[Device]) -> None:
    """Pin the parameters of a model where one of its devices is an accelerator.

    Args:
        model: model whose parameters are pinned.
        how: ``"alloc"`` moves them into pinned memory; ``"register"`` pins them in place (CUDA only); ``"off"``.
        devices: devices of the pipeline. Virtual devices need no pinned memory, so for them nothing is done.

    Raises:
        ConfigError: ``how`` is none of the three.
    """
    if how not in ("alloc", "register", "off"):
        raise ConfigError(f'pin_model must be "alloc", "register" or "off", found {how!r}.')
    accelerators = [device for device in devices if isinstance(device, AcceleratorDevice)]
    if how == "off" or not accelerators:
        return
    for parameter in model.parameters():
        if parameter.device.type != "cpu" or parameter.is_pinned():
            continue
        if how == "alloc":
            parameter.data = parameter.data.pin_memory()
        else:
            _register(parameter, accelerators[0])


def _register(parameter: nn.Parameter, device: Device) -> None:
    if device.torch_device.type != "cuda":
        raise ConfigError(f'pin_model="register" needs CUDA, found {device.name}. Use pin_model="alloc".')
    size = parameter.nbytes
    status = torch.cuda.cudart().cudaHostRegister(parameter.data_ptr(), size, 0)
    if int(status) != 0:
        raise DeviceError(f'pin_model="register": CUDA error {int(status)} for a parameter of {size} bytes.')
