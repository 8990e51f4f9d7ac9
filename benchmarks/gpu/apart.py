"""A process that ends in time, with everything that it started."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["Done", "run_apart"]

ROOT = Path(__file__).parents[2]

# Asks Linux to end the process when its parent was killed, so that no GPU stays taken, and becomes the command. Nothing of
# it runs between fork and exec, where a thread of the parent may hold a lock.
_ENDS_WITH_PARENT = """
import ctypes, os, sys
set_of_process = getattr(ctypes.CDLL(None), "prctl", None)
if set_of_process is not None:
    set_of_process(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
os.execvp(sys.argv[1], sys.argv[1:])
"""


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
            [sys.executable, "-c", _ENDS_WITH_PARENT, *command],
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=error,
            start_new_session=True,
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


@contextlib.contextmanager
def _file(path: Path | None) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() if path is None else path.open("ab+") as file:
        yield file


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
