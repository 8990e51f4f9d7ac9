"""A process that has a model open, and answers each line of its standard input with a line of its standard output."""

from __future__ import annotations

import json
import pathlib
import subprocess
from collections.abc import Sequence
from typing import IO, Any

__all__ = ["Served"]


class Served:
    """Such a process. Its first line is about itself: ``facts``."""

    # command: what starts it
    # folder: where it runs; `None`, the default, for here

    def __init__(self, command: Sequence[str], folder: pathlib.Path | None = None) -> None:
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, cwd=folder, text=True, **streams)
        self.facts: dict[str, str] = self._answer()

    def measure(self, *numbers: int | Sequence[int]) -> list[float]:
        """Return the numbers, by default milliseconds, of what others ask for, as the process understands them."""
        _open(self._process.stdin).write(f"{json.dumps(numbers)}\n")
        _open(self._process.stdin).flush()
        found: list[float] = self._answer()
        return found

    def close(self) -> None:
        """End the process."""
        _open(self._process.stdin).close()
        self._process.wait(60)
        _open(self._process.stdout).close()

    def _answer(self) -> Any:
        for line in _open(self._process.stdout):
            if line.startswith(("{", "[")):  # libraries print other lines
                return json.loads(line)
        raise RuntimeError(f"{self._process.args} ended with {self._process.wait(60)} before it answered")


def _open(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
