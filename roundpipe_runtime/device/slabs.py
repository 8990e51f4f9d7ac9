"""Pinned memory for many tensors of known sizes, in slabs that torch's allocator does not round up.

torch gives pinned memory in powers of two: a tensor of 2.1 GB takes 4.3. So tensors are packed into slabs whose sizes
are powers of two themselves. Each tensor nevertheless has a storage of its own: it is saved, shared and freed alone.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Hashable, Mapping, Sequence

import torch

# Bytes at which a tensor begins, for the instructions of the host and the transfers of a device.
_ALIGNMENT = 64

# Bytes of the smallest slab, a page.
_SMALLEST = 4096

# Bytes of a large slab. Larger ones are taken only where too much is lost otherwise: while parameters move into a slab,
# both take memory.
_LARGE = 2**30

# The share of all bytes that may be lost, and that which may be lost where the last tensors are packed.
_LOST, _LOST_AT_END = 0.01, 0.005


def plan_slabs(sizes: Sequence[int]) -> list[tuple[int, dict[int, int]]]:
    """Pack tensors into slabs, the largest first, so that about a hundredth of the slabs is left over.

    >>> plan_slabs([6000, 2000, 100])
    [(8192, {0: 0, 1: 6016, 2: 8064})]
    >>> plan_slabs([5000, 4096])
    [(8192, {0: 0}), (4096, {1: 0})]
    """
    # returns: the bytes of each slab, a power of two, and the offsets of the tensors in it by their number
    rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    total, limit = sum(rounded), _LARGE
    while True:
        slabs = _pack(rounded, limit)
        if limit >= total or sum(size for size, _ in slabs) <= (1 + _LOST) * total:
            return slabs
        limit *= 2


def _pack(sizes: Sequence[int], limit: int) -> list[tuple[int, dict[int, int]]]:
    """Slabs of at most ``limit`` bytes, but for tensors that are larger."""
    waiting = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    total = left = sum(sizes)
    slabs = []
    while waiting:
        nbytes = max(_SMALLEST, _power_of_two(sizes[waiting[0]]))
        tried = []
        while True:
            placed, used = _fill(waiting, sizes, nbytes)
            lost = nbytes - used
            # what is lost counts for each byte that is stored; of two that lose as much, the larger slab
            tried.append((0.0 if lost <= _LOST_AT_END * total else lost / nbytes, -nbytes, placed, used))
            if nbytes >= min(left, limit):
                break
            nbytes *= 2
        _, size, placed, used = min(tried, key=lambda one: one[:2])
        slabs.append((-size, placed))
        left -= used
        waiting = [number for number in waiting if number not in placed]
    return slabs


def _fill(waiting: Sequence[int], sizes: Sequence[int], nbytes: int) -> tuple[dict[int, int], int]:
    placed, used = {}, 0
    for number in waiting:
        if used + sizes[number] <= nbytes:
            placed[number] = used
            used += sizes[number]
    return placed, used


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


class PinnedMemory:
    """Pinned memory with a place for each of many tensors. A slab is allocated when the first of them asks."""

    # sizes: bytes of the place of each tensor, by a key

    def __init__(self, sizes: Mapping[Hashable, int]) -> None:
        keys = [key for key, size in sizes.items() if size]
        self._slabs = plan_slabs([sizes[key] for key in keys])
        self._places = {
            keys[number]: (slab, offset)
            for slab, (_, placed) in enumerate(self._slabs)
            for number, offset in placed.items()
        }
        self._memory: dict[int, memoryview] = {}
        self._holders: dict[Hashable, weakref.ref[memoryview]] = {}
        self._sizes = sizes
        self._lock = threading.Lock()

    @property
    def keys(self) -> list[Hashable]:
        """The keys in the order of the slabs."""
        return list(self._places)

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, whether they are allocated or not."""
        return sum(size for size, _ in self._slabs)

    @property
    def is_held(self) -> bool:
        """Whether a tensor lives in this memory."""
        return any(holder() is not None for holder in self._holders.values())

    def empty_like(self, key: Hashable, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return an uninitialised tensor in the place of a key, which is free again when its storage is gone."""
        # tensor: tensor of the same shape, strides and dtype
        # returns: the tensor; `None` where the place is taken, has another size, or the strides leave gaps
        if self._sizes.get(key) != tensor.nbytes or not _is_dense(tensor):
            return None
        with self._lock:
            found = self._holders.get(key)
            if key not in self._places or (found is not None and found() is not None):
                return None
            slab, offset = self._places[key]
            memory = self._memory.get(slab)
            if memory is None:
                memory = self._memory[slab] = _allocate(self._slabs[slab][0])
            part = memory[offset : offset + tensor.nbytes]
            self._holders[key] = weakref.ref(part)
        # The storage holds `part`, as long as any tensor holds the storage.
        flat = torch.frombuffer(part, dtype=torch.uint8).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the strides leave no gaps: torch keeps such strides only."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _allocate(nbytes: int) -> memoryview:
    slab = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    memory = (ctypes.c_char * nbytes).from_address(slab.data_ptr())
    memory._slab = slab  # type: ignore[attr-defined]  # ctypes knows the address, and this holds the memory
    return memoryview(memory).cast("B")
