"""What a pipeline is made with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch

from ..device.accelerator import AcceleratorDevice
from ..device.virtual import Device, DeviceSpec
from ..engine.config import RoundPipeRunConfig
from ..errors import ConfigError

__all__ = ["PipelineOptions"]


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineOptions:
    """The arguments of :class:`RoundPipe`, which describes them, without the model.

    Attributes:
        title: name in errors and timelines: ``name``, or ``"file:line"`` of the call.

    Raises:
        ConfigError: when an argument has a value that it cannot have.
    """

    title: str
    optim_dtype: torch.dtype | None = None
    name: str | None = None
    model_run_config: RoundPipeRunConfig = dataclasses.field(default_factory=RoundPipeRunConfig)
    pin_model: Literal["alloc", "register", "off"] = "alloc"
    devices: DeviceSpec = None

    def __post_init__(self) -> None:
        dtype: Any = self.optim_dtype
        config = self.model_run_config
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"optim_dtype must be a floating dtype, like torch.float32, found {dtype!r}.")
        if not isinstance(config, RoundPipeRunConfig):
            raise ConfigError(f"model_run_config must be a RoundPipeRunConfig, found {type(config).__qualname__}.")

    def picklable(self, devices: Sequence[Device]) -> PipelineOptions:
        """Return these options with devices that can be created elsewhere.

        Args:
            devices: devices that were created from the options.
        """
        if isinstance(self.devices, str | None):
            return self
        on_accelerators = all(isinstance(device, AcceleratorDevice) for device in devices)
        names = [device.name for device in devices] if on_accelerators else f"virtual:{len(devices)}"
        return dataclasses.replace(self, devices=names)
