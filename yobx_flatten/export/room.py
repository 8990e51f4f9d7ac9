"""Check that memory and disk hold what an export makes, before it begins."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import sys

import torch

from ..errors import NoRoomError
from ..errors.messages import format_bytes
from ..huggingface.layer_weights import largest_layer
from .quantization import Quantization

__all__ = ["check_room", "memory_available", "peak_memory", "weight_bytes"]

_BESIDE = 2**29  # libraries, the graph and activations of short inputs; measured on models of 135 million and more
_TRIFLE = 2**28  # below, the libraries take more than the weights


def weight_bytes(module: torch.nn.Module) -> int:
    """Return how many bytes the parameters and buffers of a module take, what is tied counted once.

    >>> weight_bytes(torch.nn.Linear(3, 2))
    32
    """
    from ..private_names.of_torch import FakeTensor

    found = {}
    for tensor in (*module.parameters(), *module.buffers()):
        place, size = id(tensor), tensor.numel() * tensor.element_size()
        if not (isinstance(tensor, FakeTensor) or tensor.is_meta):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # of a tensor without plain memory
                storage = tensor.untyped_storage()
                place, size = storage.data_ptr() or place, storage.nbytes()
        found[place] = size
    return sum(found.values())


def check_room(
    module: torch.nn.Module,
    path: pathlib.Path,
    *,
    in_memory: int = 1,
    quantization: Quantization | None = None,
    proof: str = "full",
) -> None:
    """Refuse an export that would fill the disk or the memory.

    Args:
        module: the module. Of one whose weights are read layer by layer, the memory holds the largest layer, its
            weights in the type of the file, and what is written of it.
        path: the path of a file that is to be written.
        in_memory: how often the weights will be in memory in addition to the module itself.
        quantization: how weights will be stored in fewer bits; ``None`` where they are not.
        proof: what is replayed; with ``"none"`` no file in float is written before one in fewer bits.

    Raises:
        NoRoomError: stating what is needed and what is free.
    """
    weights = weight_bytes(module)
    few = 0 if quantization is None else _bytes_in_bits(module, quantization.bits)
    written = weights if quantization is None else few if proof == "none" else weights + few
    there = next(folder for folder in (path.absolute().parent, *path.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < written:
        raise NoRoomError(
            f"The disk is too small: the weights take {format_bytes(written)}, and {format_bytes(free)} are free in "
            f"{there}. Name a folder on another disk, or make room there."
        )
    largest = largest_layer(module)
    # a file is mapped next to a model that is read layer by layer, and gives way
    needed = (4 * largest if largest else in_memory * weights) + _BESIDE
    left = memory_available()
    if weights >= _TRIFLE and left < needed:
        raise NoRoomError(
            f"The export needs {format_bytes(needed)} of memory in addition to the model, and {format_bytes(left)} are "
            "available. Close other programs, export in float16, or leave the proof out, which is most of it:\n"
            '    proof="none"'
        )


def _bytes_in_bits(module: torch.nn.Module, bits: int) -> int:
    """Return how many bytes the weights take where those of projections are stored in few bits."""
    numbers = {id(part.weight): part.weight.numel() for part in module.modules() if isinstance(part, torch.nn.Linear)}
    tables = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Embedding)}
    kept = weight_bytes(module) - sum(
        weight.numel() * weight.element_size()
        for weight in module.parameters()
        if id(weight) in numbers and id(weight) not in tables
    )
    return kept + sum(numbers.values()) * bits // 8


def peak_memory() -> int:
    """Return the most memory that this process has held so far, in bytes."""
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
