"""One program on one row, in a separate process: ``python -m benchmarks.gpu.measure ROW PROGRAM``.

It prints one line of JSON after the timed steps, and a longer one after each further pass; the last line counts. So
a process that is ended early has what it found.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.gpu.programs import PROGRAMS, Program
from benchmarks.gpu.rows import Row, named_row
from roundpipe_runtime.estimate.hardware import host_memory_available

__all__ = ["copied_bytes", "measured"]

WARM_UPS = 2
STEPS = 3
# Seconds: no further step is timed after so many of them, and a second warm-up only follows a quick first one.
TIMED = 60.0
QUICK = 12.0


class HostMemory:
    """The memory that a block takes of the host, from :meth:`begin` on: of this process, and of what was free before.

    Pinned memory is in the second one on every system, and in the first one on some.
    """

    def __enter__(self) -> HostMemory:
        self._free = host_memory_available()
        self._process = psutil.Process()
        self.begin()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def begin(self) -> None:
        """Forget what was taken for a moment before."""
        self.taken = self.resident = 0

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            self.taken = max(self.taken, self._free - host_memory_available())
            self.resident = max(self.resident, self._process.memory_info().rss)


def measured(
    program: str, row: Row, device: torch.device, report: Callable[[dict[str, Any]], None], *, until: float
) -> None:
    """Train some steps, and report what was found: first the steps, then also one without the optimizer, then copies.

    Args:
        program: name of the program.
        row: what it trains.
        device: accelerator, or the CPU.
        report: called with everything found so far.
        until: time by ``time.monotonic()`` after which no further pass begins.
    """
    has_memory = device.type != "cpu"
    if has_memory:
        torch.accelerator.set_device_index(device.index or 0)
    with HostMemory() as memory:
        begin = time.monotonic()
        made = PROGRAMS[program](row, device)
        built = time.monotonic() - begin
        losses, warm = [], []
        while not warm or (len(warm) < WARM_UPS and warm[0] < QUICK):
            loss, seconds = _step(made, device)
            losses.append(loss)
            warm.append(seconds)
        gc.collect()
        memory.begin()
        if has_memory:
            torch.accelerator.reset_peak_memory_stats(device)
        times: list[float] = []
        while not times or (len(times) < STEPS and sum(times) < TIMED):
            loss, seconds = _step(made, device)
            losses.append(loss)
            times.append(seconds)
        made.finish()
    weights = parameters(made)
    median = statistics.median(times)
    found: dict[str, Any] = {
        "losses": losses[:3],
        "seconds": times,
        "warm-up seconds": warm,
        "seconds to build": built,
        "tokens per second": row.tokens / median,
        "TFLOPS": flops_per_token(row, weights) * row.tokens / median / 1e12,
        "parameters": weights,
        "device peak": torch.accelerator.max_memory_allocated(device) if has_memory else None,
        "device reserved": torch.accelerator.max_memory_reserved(device) if has_memory else None,
        "host resident": memory.resident,
        "host taken": memory.taken,
        "clipping": None,
        "threads": torch.get_num_threads(),
    }
    report(found)
    if time.monotonic() + 2 * median < until:
        made.accumulate()  # what was on its way in an asynchronous step has arrived
        found["seconds without optimizer"] = alone = _timed(made.accumulate, device)[1]
        found["optimizer seconds that show"] = max(0.0, median - alone)
        report(found)
    if time.monotonic() + 2 * median < until:
        found["link bytes"] = link_bytes(lambda: _step(made, device), device)
        report(found)


def _step(made: Program, device: torch.device) -> tuple[float, float]:
    def once() -> float:
        loss = made.accumulate()
        made.update()
        return loss

    return _timed(once, device)


def _timed(work: Callable[[], float], device: torch.device) -> tuple[float, float]:
    _wait(device)
    start = time.perf_counter()
    found = work()
    _wait(device)
    return found, time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def parameters(made: Program) -> int:
    """Count the weights of the model; a quantized weight counts as one number each."""
    from roundpipe_runtime.huggingface.quantize import count_weights

    return count_weights(made.model)


def flops_per_token(row: Row, weights: int) -> int:
    """Operations of a token: 2 for each weight in the forward, and 4 in the backward, of which frozen ones take 2."""
    return (4 if row.adapters else 6) * weights


# -- bytes of the link -------------------------------------------------------------------------------------------------


def link_bytes(step: Callable[[], object], device: torch.device) -> dict[str, int] | None:
    """The bytes up and down of a step, where they are counted."""
    if device.type == "late":
        from tests.accelerator import late

        late.counts()
        step()
        counts = late.counts()
        return {way: sum(n for what, n in counts.items() if what.startswith(f"bytes {way}")) for way in ("up", "down")}
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.accelerator.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found = copied_bytes(json.loads(path.read_text())["traceEvents"])
        return found if any(found.values()) else None  # a container may forbid the counters of the driver


def copied_bytes(events: list[dict[str, Any]]) -> dict[str, int]:
    """The bytes of copies between host and device among the events of a profile."""
    ways = {"up": "HtoD", "down": "DtoH"}
    found = dict.fromkeys(ways, 0)
    for event in events:
        for way, mark in ways.items():
            if str(event.get("cat", "")) == "gpu_memcpy" and mark in str(event.get("name", "")):
                found[way] += int(event["args"]["bytes"])
    return found


# -- the process -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row")
    parser.add_argument("program")
    parser.add_argument("--device", required=True)
    parser.add_argument("--seconds", type=float, required=True, help="after which no further pass begins")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    if options.device.startswith("late"):  # the reference accelerator, made of the CPU
        importlib.import_module("tests.accelerator.late")

    def report(found: dict[str, Any]) -> None:
        print(json.dumps(found), flush=True)

    measured(options.program, named_row(options.row), torch.device(options.device), report, until=until)
    sys.stdout.flush()
    os._exit(0)  # threads of the programs may not end by themselves


if __name__ == "__main__":
    main()
