"""Memory use of the process and of its accelerators."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..device.virtual import AcceleratorDevice, Device

__all__ = ["device_peak", "process_memory"]


def process_memory() -> int:
    """Return the bytes of memory that the process holds now (resident set size)."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def device_peak(devices: Iterable[Device]) -> int | None:
    """Return the peak bytes of tensors on one of the accelerators; ``None`` where there are none.

    Virtual devices use memory of the process.
    """
    accelerators = [device.torch_device for device in devices if isinstance(device, AcceleratorDevice)]
    return max((torch.accelerator.max_memory_allocated(device) for device in accelerators), default=None)
