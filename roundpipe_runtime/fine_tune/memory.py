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
    found = []
    for device in devices:
        library = torch.get_device_module(device.torch_device) if isinstance(device, AcceleratorDevice) else None
        if library is not None and hasattr(library, "max_memory_allocated"):
            found.append(int(library.max_memory_allocated(device.torch_device)))
    return max(found, default=None)
