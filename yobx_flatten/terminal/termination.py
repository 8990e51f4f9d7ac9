"""Handle SIGTERM as Ctrl-C, so that nothing half-written stays."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Terminated(KeyboardInterrupt):
    """The process got SIGTERM; a text of it reports what was written by then."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """A block in which SIGTERM raises :class:`Terminated`, unless the process handles it in another way."""
    # outside of the main thread, the only one that gets signals, it does nothing
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    process = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a fork, which its parent ends
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
