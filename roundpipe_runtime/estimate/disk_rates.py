"""Measure how fast a disk reads and writes without the page cache, with the accesses of a training."""

from __future__ import annotations

import pathlib
import time
from typing import NamedTuple

import torch

from ..device.disk import DiskMemory

_PIECE = 32 * 2**20  # bytes that are read or written at a time
_LONG_ENOUGH = 0.3  # seconds, after which no further piece is begun
_MOST = 32  # pieces


class DiskRates(NamedTuple):
    """Rates of a disk."""

    read: float  # bytes per second
    write: float  # bytes per second


def measure_disk(folder: pathlib.Path) -> DiskRates:
    """Measure the disk of a folder; it takes a second, and up to 1 GB there meanwhile."""
    memory = DiskMemory(folder.absolute(), together=_PIECE)
    try:
        source = torch.randint(0, 256, (_PIECE,), dtype=torch.uint8)  # a disk may compress zeros
        pieces: list[torch.Tensor] = []
        start = time.perf_counter()
        while len(pieces) < 2 or (time.perf_counter() - start < _LONG_ENOUGH and len(pieces) < _MOST):
            pieces.append(memory.copy(("piece", len(pieces)), source))
            memory.leave(pieces[-1:])
            memory.settle()
        written = time.perf_counter() - start
        start = time.perf_counter()
        for piece in pieces:
            memory.fetch([piece]).result()
            memory.leave([piece], written=False)
        read = time.perf_counter() - start
    finally:
        memory.close()
    return DiskRates(len(pieces) * _PIECE / read, len(pieces) * _PIECE / written)
