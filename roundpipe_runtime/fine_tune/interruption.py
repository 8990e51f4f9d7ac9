"""Handle Ctrl-C and SIGTERM while training: the first signal asks to stop, the second ends the process."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"


class Interruption:
    """A context manager in which the first Ctrl-C or SIGTERM is recorded instead of ending the process.

    ::

        with Interruption() as interruption:
            while not interruption.status:
                step()

    Outside of the main thread, the only one that gets signals, the block does nothing.
    """

    # is_silent: whether a first signal is recorded without a message, in one of several processes

    def __init__(self, *, is_silent: bool = False) -> None:
        self.status = 0
        self.is_silent = is_silent
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.status:  # at once: no thread is waited for, and no file that is half written counts
            if os.isatty(2):
                os.write(2, _SHOW_CURSOR)
            os.write(2, b"\nleft at once; nothing more was saved\n")
            os._exit(128 + number)
        if not self.is_silent:
            os.write(2, b"\nstopping after this step; press Ctrl-C again to quit now\n")
        self.status = 128 + number
