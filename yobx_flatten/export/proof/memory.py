"""Measure memory: the size of a module, the peak of this process, and the free memory."""

from __future__ import annotations

import contextlib
import pathlib
import sys

import torch


def weight_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers; tied ones count once.

    >>> weight_bytes(torch.nn.Linear(3, 2))
    32
    """
    from ...private_names.of_torch import FakeTensor

    found = {}
    for tensor in (*module.parameters(), *module.buffers()):
        place, size = id(tensor), tensor.numel() * tensor.element_size()
        if not (isinstance(tensor, FakeTensor) or tensor.is_meta):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # of a tensor without plain memory
                storage = tensor.untyped_storage()
                place, size = storage.data_ptr() or place, storage.nbytes()
        found[place] = size
    return sum(found.values())


def peak_memory() -> int:
    """Return the peak memory of this process, in bytes."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def memory_available() -> int:
    """Return how many bytes of memory processes can still take, limits of containers included."""
    import psutil

    available = int(psutil.virtual_memory().available)
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        most, now = (int((group / name).read_text("ascii")) for name in ("memory.max", "memory.current"))
        held = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
    except (OSError, ValueError):  # no such file, or "max"
        return available
    return min(available, most - now + int(held.get("file", 0)))  # what is cached of files gives way
