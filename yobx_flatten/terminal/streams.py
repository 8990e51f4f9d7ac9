"""Survive an output stream that closes early or lacks characters."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class _LastingStream:
    """A text stream that takes every character, also after its reader has ended, as of ``yobx-flatten list | head``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            return self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except BrokenPipeError:
            self._discard()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._discard()

    def _discard(self) -> None:
        """Let the descriptor lead nowhere, also for what Python flushes when the process ends."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_streams() -> Iterator[None]:
    """A block in which printing raises nothing; characters that the terminal has not are printed by their number."""
    with contextlib.ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # pythonw
                continue
            stack.callback(setattr, sys, name, stream)
            setattr(sys, name, _LastingStream(stream))
        yield
