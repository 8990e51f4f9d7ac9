"""Check that memory and disk hold what an export makes, before it begins."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import sys

import torch

from ..errors import NoRoomError
from ..errors.messages import format_bytes

__all__ = ["check_room", "peak_memory", "weight_bytes"]

_BESIDE = 2**29  # libraries, the graph and activations of short inputs; measured on models of 135 million and more
_TRIFLE = 2**28  # below, the libraries take more than the weights


def weight_bytes(module: torch.nn.Module) -> int:
    """Return how many bytes the parameters and buffers of a module take, what is tied counted once.

    >>> weight_bytes(torch.nn.Linear(3, 2))
    32
    """
    from torch._subclasses.fake_tensor import FakeTensor

    found = {}
    for tensor in (*module.parameters(), *module.buffers()):
        place, size = id(tensor), tensor.numel() * tensor.element_size()
        if not (isinstance(tensor, FakeTensor) or tensor.is_meta):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # of a tensor without plain memory
                storage = tensor.untyped_storage()
                place, size = storage.data_ptr() or place, storage.nbytes()
        found[place] = size
    return sum(found.values())


def check_room(module: torch.nn.Module, path: pathlib.Path, *, in_memory: int = 1) -> None:
    """Refuse an export that would fill the disk or the memory.

    Args:
        module: the module.
        path: the path of a file that is to be written.
        in_memory: how often the weights will be in memory in addition to the module itself.

    Raises:
        NoRoomError: stating what is needed and what is free.
    """
    weights = weight_bytes(module)
    there = next(folder for folder in (path.absolute().parent, *path.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < weights:
        raise NoRoomError(
            f"The disk is too small: the weights take {format_bytes(weights)}, and {format_bytes(free)} are free in "
            f"{there}. Name a folder on another disk, or make room there."
        )
    needed = in_memory * weights + _BESIDE
    left = _memory_available()
    if weights >= _TRIFLE and left < needed:
        raise NoRoomError(
            f"The export needs {format_bytes(needed)} of memory in addition to the model, and {format_bytes(left)} are "
            "available. Close other programs, export in float16, or leave the proof out, which is most of it:\n"
            '    proof="none"'
        )


def peak_memory() -> int:
    """Return the most memory that this process has held so far, in bytes."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def _memory_available() -> int:
    """Bytes of memory that processes can still take, limits of containers included."""
    import psutil

    available = int(psutil.virtual_memory().available)
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        most, now = (int((group / name).read_text("ascii")) for name in ("memory.max", "memory.current"))
        held = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
    except (OSError, ValueError):  # no such file, or "max"
        return available
    return min(available, most - now + int(held.get("file", 0)))  # what is cached of files gives way
