"""Parse ``devices=``: virtual devices, accelerators by their name, or all of the machine.

Importing this file touches no accelerator and starts no thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from ..errors import ConfigError, DeviceError
from .accelerator import AcceleratorDevice
from .protocol import Device
from .virtual import VirtualDevice

__all__ = ["DeviceSpec", "parse_devices"]


DeviceSpec: TypeAlias = "str | torch.device | Sequence[torch.device | str | Device] | None"

# One object, so one thread, per accelerator and process, for as long as a pipeline holds it.
_ACCELERATORS: weakref.WeakValueDictionary[torch.device, AcceleratorDevice] = weakref.WeakValueDictionary()
_STREAMS: dict[torch.device, tuple[torch.Stream, ...]] = {}


def parse_devices(devices: DeviceSpec = None) -> list[Device]:
    """Parse an argument ``devices=`` into a list of devices.

    Args:
        devices: ``"virtual:N"`` for N devices made of the CPU, ``"virtual:N:check"`` for N that check every access; a
            list of torch devices, or of :class:`Device` objects to share between pipelines; ``None`` for all
            accelerators of the machine, or two virtual devices where there is none.

    Returns:
        The devices.

    Raises:
        ConfigError: the argument describes no device.

    >>> parse_devices("virtual:2")
    [VirtualDevice('virtual:0'), VirtualDevice('virtual:1')]
    """
    if devices is None:
        devices = _all_accelerators() or "virtual:2"
    if isinstance(devices, torch.device):
        return [_accelerator(devices)]
    if isinstance(devices, str):
        if not devices.startswith("virtual"):
            return [_accelerator(devices)]
        return _virtual(devices)
    try:
        named = list(devices)
    except TypeError as error:
        raise ConfigError(
            f"devices={devices!r} names no device. Use 'virtual:2', or a list of torch devices."
        ) from error
    found = [_one(device) for device in named]
    if not found:
        raise ConfigError("devices=[] names no device. Use 'virtual:2', or a list of torch devices.")
    names = [device.name for device in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"devices={names} names a device twice.")
    return found


def _virtual(text: str) -> list[Device]:
    _, _, rest = text.partition(":")
    number, _, option = rest.partition(":")
    if not number.isdecimal() or int(number) < 1 or option not in ("", "check"):
        raise ConfigError(f"devices={text!r} names no device. Use 'virtual:N' or 'virtual:N:check', N at least 1.")
    return [VirtualDevice(f"virtual:{index}", check=option == "check") for index in range(int(number))]


def _one(device: torch.device | str | Device) -> Device:
    return device if isinstance(device, Device) else _accelerator(device)


def _accelerator(device: torch.device | str) -> Device:
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{device!r} names no device. Use 'virtual:2', or a list of torch devices.") from error
    if device.type in ("cpu", "meta"):
        raise ConfigError(f"{str(device)!r} is not an accelerator. To run on the CPU, use devices='virtual:2'.")
    if not torch.accelerator.is_available():
        raise DeviceError(f"{str(device)!r} was asked for, but torch finds no accelerator here. Use 'virtual:2'.")
    index: int | None = device.index  # torch's stubs know no device without one
    if index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    found = _ACCELERATORS.get(device)
    if found is None or found.worker.is_closed:
        found = _ACCELERATORS[device] = AcceleratorDevice(device, _STREAMS.get(device, ()))
        _STREAMS[device] = found.streams
    return found


def _all_accelerators() -> list[torch.device]:
    kind: Callable[[], torch.device | None] = torch.accelerator.current_accelerator
    found = kind() if torch.accelerator.is_available() else None
    return [] if found is None else [torch.device(found.type, i) for i in range(torch.accelerator.device_count())]
