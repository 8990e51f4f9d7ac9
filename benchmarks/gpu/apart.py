"""A process that ends in time, with everything that it started."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["Done", "run_apart"]

ROOT = Path(__file__).parents[2]

# found before a process is forked, where nothing may be imported
_set_of_process = getattr(ctypes.CDLL(None), "prctl", None)


@dataclasses.dataclass(frozen=True)
class Done:
    """What a process printed, and its exit status: ``None`` if it was ended."""

    out: str
    error: str
    status: int | None


def run_apart(command: list[str], environment: dict[str, str], limit: float, *, log: Path | None = None) -> Done:
    """Run a command from the root of the checkout, and end its process and those below it after some seconds.

    Args:
        command: program and arguments.
        environment: all variables.
        limit: seconds.
        log: file to which everything printed is added, and which is returned as the output.
    """
    with _file(log) as out, _file(log) as error:
        # A group of its own: a compiler that outlives its parent would go on, and keep a pipe open.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=error,
            start_new_session=True,
            preexec_fn=_end_with_me,
        )
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit)
        finally:
            if status is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return Done(_text(out), _text(error), status)


def _end_with_me() -> None:
    """Let the system end this process when the one that started it was killed, so that no GPU stays taken."""
    if _set_of_process is not None:
        _set_of_process(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def _file(path: Path | None) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() if path is None else path.open("ab+") as file:
        yield file


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
