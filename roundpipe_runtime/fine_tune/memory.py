"""Memory use of the process and of its accelerators."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import torch

from ..device.virtual import AcceleratorDevice, Device

__all__ = ["device_peak", "process_memory"]


def process_memory() -> int | None:
    """Return the bytes of memory that the process holds now; the peak, where the system reports only that.

    ``None`` where the system reports neither.
    """
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


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
