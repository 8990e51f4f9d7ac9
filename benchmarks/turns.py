"""Compare programs that take turns: each in separate processes, with its own number of threads.

The number of threads is a matter of the process (OpenMP and MKL keep some of it per thread and some per process), so
what is compared does not share one. While one of them runs, the others wait on a pipe and cost nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

__all__ = ["Contestant", "Samples", "in_turns"]

# Makes the function that is timed, in its process: make(rank, world, path of a file that all its processes share).
Make = Callable[[int, int, str], Callable[[], Any]]


class Contestant(NamedTuple):
    """A program.

    Attributes:
        make: returns a step; a function of a module, so that another process finds it.
        processes: how many run it together.
        threads: the threads of torch, in each of them.
    """

    make: Make
    processes: int
    threads: int


class Samples(NamedTuple):
    """What one of them took.

    Attributes:
        seconds: the seconds of every sample: one step, until its slowest process has ended.
        cpu: CPU seconds of the same step, all its processes and threads together.
        result: what its first step returned, in the last of its processes.
    """

    seconds: list[float]
    cpu: list[float]
    result: Any

    @property
    def median(self) -> float:
        """Seconds of a step in the middle of all."""
        return statistics.median(self.seconds)


def in_turns(contestants: dict[str, Contestant], repeat: int, warmup: int = 3) -> dict[str, Samples]:
    """Run one step of each, again and again."""
    with contextlib.ExitStack() as stack:
        started = {name: stack.enter_context(_started(contestant)) for name, contestant in contestants.items()}
        results = {name: _once(ends)[2] for name, ends in started.items()}
        for _ in range(warmup):
            for ends in started.values():
                _once(ends)
        samples = {name: Samples([], [], results[name]) for name in started}
        for _ in range(repeat):
            for name, ends in started.items():
                seconds, cpu, _ = _once(ends)
                samples[name].seconds.append(seconds)
                samples[name].cpu.append(cpu)
        return samples


@contextlib.contextmanager
def _started(contestant: Contestant) -> Iterator[list[Connection]]:
    # A thread of OpenMP that waits spins for a while, by default for so long that on a busy machine it takes the core
    # from the thread that it waits for. This is long enough to get from one operator to the next.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(contestant.processes)]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_serve, args=(contestant, rank, f"{folder}/rendezvous", there), daemon=True)
            for rank, (_, there) in enumerate(pairs)
        ]
        for process in processes:
            process.start()
        ends = [here for here, _ in pairs]
        try:
            yield ends
        finally:
            for end in ends:
                with contextlib.suppress(OSError):
                    end.send(None)
            for process in processes:
                process.join(20)
                if process.is_alive():
                    process.kill()


def _once(ends: Sequence[Connection]) -> tuple[float, float, Any]:
    for end in ends:
        end.send("step")
    answers = [end.recv() for end in ends]
    for answer in answers:
        if isinstance(answer, str):
            raise SystemExit(answer)
    return max(a[0] for a in answers), sum(a[1] for a in answers), answers[-1][2]


def _serve(contestant: Contestant, rank: int, path: str, end: Connection) -> None:
    import traceback

    import torch

    torch.set_num_threads(contestant.threads)
    step = None
    while end.recv() is not None:
        try:
            step = step or contestant.make(rank, contestant.processes, path)
            cpu, start = time.process_time(), time.perf_counter()
            result = step()
            end.send((time.perf_counter() - start, time.process_time() - cpu, result))
        except Exception:
            end.send(traceback.format_exc())
