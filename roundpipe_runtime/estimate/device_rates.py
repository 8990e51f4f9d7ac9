"""Measure the speed of an accelerator and of a disk."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from ..device.disk import DiskMemory
from ..engine.config import RoundPipeRunConfig
from ..pipeline import RoundPipe
from ..schedule.plan import ModelExecutePlan

_COPIED = 256 * 2**20  # bytes of a copy that is measured
_ROWS = 8192  # rows and columns of a matrix
_REPEATS = 3  # number of measurements, of which the fastest counts

Work: TypeAlias = "tuple[torch.Stream, Callable[[], object]]"


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceRates:
    up: float  # bytes per second from pinned memory to the device
    down: float  # bytes per second from the device to pinned memory
    both: float  # bytes per second in both directions together, when copied at the same time
    pageable_up: float  # bytes per second from memory that is not pinned
    pageable_down: float  # bytes per second to memory that is not pinned
    flops: float  # operations per second in products of matrices
    # share of the shorter of copy and computation that the other hides: 1.0 if they run in parallel, 0.0 if one waits
    overlap: float
    clock: float  # seconds by the events of the device in one second of the host

    def tokens_to_hide_transfers(self) -> float:
        """Return the number of tokens per step above which a forward takes longer than the upload of its parameters.

        >>> rates = DeviceRates(50e9, 50e9, 1e11, 8e9, 8e9, 500e12, 1.0, 1.0)
        >>> rates.tokens_to_hide_transfers()
        10000.0
        """
        # two operations per token and parameter; each parameter has two bytes and is uploaded once per step
        return 2 * self.flops / (2 * self.up)


def measure_device(
    device: torch.device, *, dtype: torch.dtype = torch.bfloat16, nbytes: int = _COPIED, rows: int = _ROWS
) -> DeviceRates:
    """Measure the copy rates and matrix products of an accelerator, in about a second."""
    uploads, downloads, compute = (torch.Stream(device) for _ in range(3))
    pinned = [torch.zeros(nbytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    pageable = torch.zeros(nbytes, dtype=torch.uint8)
    there = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    matrix = torch.ones(rows, rows, dtype=dtype, device=device)

    up = uploads, lambda: there[0].copy_(pinned[0], non_blocking=True)
    down = downloads, lambda: pinned[1].copy_(there[1], non_blocking=True)
    product = compute, lambda: matrix @ matrix
    alone = {name: _seconds(device, work) for name, work in (("up", up), ("down", down), ("product", product))}
    together = _seconds(device, up, down)
    pageable_up = _seconds(device, (uploads, lambda: there[0].copy_(pageable)))
    pageable_down = _seconds(device, (downloads, lambda: pageable.copy_(there[1])))

    # enough products to take about as long as an upload
    number = max(1, round(alone["up"] / alone["product"]))
    products = compute, lambda: [matrix @ matrix for _ in range(number)]
    computing = _seconds(device, products)
    hidden = alone["up"] + computing - _seconds(device, up, products)
    start = time.perf_counter()
    clock = _once(device, (products,)) / (time.perf_counter() - start)
    return DeviceRates(
        up=nbytes / alone["up"],
        down=nbytes / alone["down"],
        both=2 * nbytes / together,
        pageable_up=nbytes / pageable_up,
        pageable_down=nbytes / pageable_down,
        flops=2 * rows**3 / alone["product"],
        overlap=min(1.0, max(0.0, hidden / min(alone["up"], computing))),
        clock=clock,
    )


def _seconds(device: torch.device, *works: Work) -> float:
    return min(_once(device, works) for _ in range(_REPEATS))


def _once(device: torch.device, works: tuple[Work, ...]) -> float:
    torch.accelerator.synchronize(device)
    first = works[0][0]
    begin = first.record_event(torch.Event(device, enable_timing=True))
    for stream, work in works:
        stream.wait_event(begin)
        with stream:
            work()
    for stream, _ in works[1:]:
        first.wait_event(stream.record_event())
    end = first.record_event(torch.Event(device, enable_timing=True))
    end.synchronize()
    return max(float(begin.elapsed_time(end)) / 1e3, 1e-9)


# -- the interpreter's cost of calling a layer, and the disk -----------------------------------------------------------

_LAYERS, _MICROBATCHES, _WIDTH = 16, 4, 8
_CALLS = 5


def call_seconds() -> float:
    """Measure the CPU seconds that a pipeline adds per layer and microbatch of a step."""
    layers = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)])
    inputs = torch.ones(_MICROBATCHES, _WIDTH)
    last = _LAYERS - 4
    plan = ModelExecutePlan([range(last)], [range(first, first + 4) for first in range(last, -1, -4)])
    config = RoundPipeRunConfig(num_microbatch=_MICROBATCHES, loss_reduction="mean", execute_plan=plan)

    def alone() -> None:
        for row in inputs.split(1):
            with torch.no_grad():
                layers(row)
            layers(row).square().mean().backward()

    pipe = RoundPipe(layers, devices="virtual:1", model_run_config=config)

    def pipeline() -> None:
        pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().mean())
        pipe.zero_grad()

    def least(work: Callable[[], None]) -> float:
        found = []
        for _ in range(_CALLS + 1):
            start = time.process_time()
            work()
            found.append(time.process_time() - start)
        return min(found[1:])

    with contextlib.closing(pipe):
        beyond = least(pipeline) - least(alone)
    return max(0.0, beyond) / (_LAYERS * _MICROBATCHES)


_PIECE = 32 * 2**20  # bytes that are read or written at a time
_LONG_ENOUGH = 0.3  # seconds, after which no further piece is begun
_MOST = 32  # pieces


class DiskRates(NamedTuple):
    read: float  # bytes per second
    write: float  # bytes per second


def measure_disk(folder: pathlib.Path) -> DiskRates:
    """Measure the rates of a disk, in about a second, with up to 1 GB of temporary data."""
    memory = DiskMemory(folder.absolute(), together=_PIECE)
    with contextlib.closing(memory):
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
    return DiskRates(len(pieces) * _PIECE / read, len(pieces) * _PIECE / written)
