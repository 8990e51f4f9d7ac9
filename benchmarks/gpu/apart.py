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

# Runs the command, and ends its group when the pipe from the parent ends. So a parent that was killed leaves no GPU
# taken, and no compiler that writes what the next call compiles again.
_ENDS_WITH_PARENT = """
import contextlib, os, signal, subprocess, sys, threading

# where memory runs out the kernel ends this process and those below, and not the one that writes the records
with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")

def end_with_parent():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with_parent, daemon=True).start()
status = subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL).returncode
os._exit(status if status >= 0 else 128 - status)
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
        # A separate process group: a compiler that outlives its parent would keep running, and keep a pipe open.
        process = subprocess.Popen(
            [sys.executable, "-c", _ENDS_WITH_PARENT, *command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
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
            process.communicate()
        return Done(_text(out), _text(error), status)


@contextlib.contextmanager
def _file(path: Path | None) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() if path is None else path.open("ab+") as file:
        yield file


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
