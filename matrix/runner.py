"""One process per type, with a time limit and a memory limit; a process that dies is a result like any other.

The processes are forked from one that has imported torch and transformers, but has built no model: a new process costs
nothing then, and is as fresh as a new interpreter as far as models, registrations and programs go.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from . import worker

__all__ = ["Limits", "Runner", "Work", "sample"]

_OUTPUT_KEPT = 2000
# type, columns to run, whether columns passed earlier
Work = tuple[str, list[str], dict[str, bool | None]]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one type may take.

    Attributes:
        seconds: the most time for all of its columns.
        gigabytes: the most address space.
    """

    seconds: float = 900.0
    gigabytes: float = 16.0


class Runner:
    """Runs types in processes of their own.

    Args:
        way: a name of `ways.WAYS`.
        limits: for each type.
        run: runs the columns of a type, `worker.run_type`; tests put something else here.
        load: loads what the column "save and load" stored, `worker.load_stored`.
        preload: modules to import once for all processes.
    """

    def __init__(
        self,
        way: str,
        limits: Limits,
        run: Callable[..., None] = worker.run_type,
        load: Callable[..., None] = worker.load_stored,
        preload: tuple[str, ...] = ("matrix.preload",),
    ) -> None:
        self.way, self.limits, self.run, self.load = way, limits, run, load
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(list(preload))
        self._processes: set[Any] = set()

    def run_types(self, work: list[Work], jobs: int) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
        """Run several types, ``jobs`` at a time; yield each with its results when it is done."""
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            running = {pool.submit(self.run_type, *one): one[0] for one in work}
            try:
                for done in concurrent.futures.as_completed(running):
                    yield running[done], done.result()
            finally:
                for future in running:
                    future.cancel()
                for process in list(self._processes):  # when the caller stops early: these are not waited for any more
                    _end(process)

    def run_type(self, name: str, columns: list[str], known: dict[str, bool | None]) -> dict[str, dict[str, Any]]:
        """Run columns of one type.

        Args:
            name: the type.
            columns: which ones, in order.
            known: whether columns passed earlier.

        Returns:
            A result for every column. Where the process died, the column it was in failed with the reason, and those
            after it were not tried.
        """
        with tempfile.TemporaryDirectory(prefix="matrix-") as place:
            folder = pathlib.Path(place)
            started = time.monotonic()
            died = self._process(self.run, (name, self.way, columns, known), folder)
            results = read_events(folder, columns, died, time.monotonic() - started)
            if results.get(worker.STORED, {}).get("ok"):
                died = self._process(self.load, (self.way,), folder)
                loaded = read_events(folder, [worker.STORED], died, 0.0)[worker.STORED]
                loaded["seconds"] = round(loaded["seconds"] + results[worker.STORED]["seconds"], 2)
                results[worker.STORED] = loaded
        return {column: results[column] for column in columns}

    def _process(self, target: Callable[..., None], arguments: tuple[Any, ...], folder: pathlib.Path) -> str | None:
        """Run a function in a process to its end; return why it did not come there by itself, or ``None``."""
        (folder / "events.jsonl").unlink(missing_ok=True)
        process = self.context.Process(
            target=_limited, args=(target, arguments, folder, self.limits.gigabytes), daemon=False
        )
        process.start()
        self._processes.add(process)
        try:
            process.join(self.limits.seconds)
            if process.is_alive():
                return f"TimeoutError: more than {self.limits.seconds:.0f} seconds"
        finally:
            _end(process)
            self._processes.discard(process)
        code = process.exitcode or 0
        if code == 0:
            return None
        if code < 0:
            return f"{signal.Signals(-code).name}: the process was ended by a signal"
        output = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")[-_OUTPUT_KEPT:]
        said = [line.strip() for line in output.splitlines() if line.strip()]
        return f"exit code {code}: {said[-1][:200]}" if said else f"exit code {code}"


def _end(process: Any) -> None:
    """End a process, and what it started."""
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _limited(target: Callable[..., None], arguments: tuple[Any, ...], folder: pathlib.Path, gigabytes: float) -> None:
    """Set up the new process: a separate process group, a limit of memory, output into a file."""
    import resource

    os.setsid()
    limit = int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)  # whatever is written without asking goes away with it
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    with open(folder / "events.jsonl", "a", encoding="utf-8") as events:
        target(*arguments, folder, events)


def read_events(folder: pathlib.Path, columns: list[str], died: str | None, seconds: float) -> dict[str, Any]:
    """Return a result for every column, from what the process wrote until it ended.

    Args:
        folder: holds ``events.jsonl``.
        columns: what it was to do.
        died: why it did not end by itself, ``None`` if it did.
        seconds: how long it took altogether.
    """
    path = folder / "events.jsonl"
    results: dict[str, dict[str, Any]] = {}
    current: str | None = None
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        event = json.loads(line)
        if "start" in event:
            current = event["start"]
        else:
            results[event["column"]] = event["result"]
            current = None
    left = [column for column in columns if column not in results]
    if left:
        blamed = current or left[0]
        why = died or "the process ended before its work was done"
        spent = seconds - sum(result.get("seconds", 0.0) for result in results.values())
        results[blamed] = {"ok": False, "why": why, "seconds": round(max(spent, 0.0), 2)}
        for column in left:
            results.setdefault(column, {"ok": None, "why": f"{blamed} ended the process"})
    return results


def sample(names: list[str], kind_of: Callable[[str], Any], count: int) -> list[str]:
    """Choose names so that every kind is there before any kind comes again.

    Args:
        names: to choose from, in order of preference.
        kind_of: what to spread over.
        count: how many.

    >>> sample(["a1", "a2", "b1", "a3", "b2"], lambda name: name[0], 3)
    ['a1', 'b1', 'a2']
    """
    rounds: dict[str, int] = {}
    seen: dict[Any, int] = {}
    for name in names:
        kind = kind_of(name)
        seen[kind] = rounds[name] = seen.get(kind, -1) + 1
    return sorted(names, key=lambda name: (rounds[name], names.index(name)))[:count]
