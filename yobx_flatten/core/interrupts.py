"""Defer signals such as SIGINT during critical sections."""

from __future__ import annotations

# The C module below `signal`, whose wrappers convert every number to an enum and take ten times as long.
import _signal  # type: ignore[import-not-found,unused-ignore]  # the stubs do not have it
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = tuple(sorted(signal.valid_signals()))


class DeferredSignals:
    """Context manager that runs the handlers of received signals only at the end of its ``with`` block.

    Python can run a signal handler between any two lines of the main thread, and the handler can raise an exception, as
    for Ctrl-C. An exception of a deferred handler is raised after the last line of the block.
    """

    __slots__ = ("_before", "_late")

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._late: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    _signal.signal(number, self._take)
        except BaseException:  # raised by a handler that is not replaced yet
            self._put_back()
            raise

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._late.append((number, frame))

    def __exit__(self, *exception: object) -> None:
        try:
            self._put_back()
        except BaseException:  # raised by a handler that is restored already
            self._put_back()
            raise
        finally:
            self._call_late()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            _signal.signal(number, handler)

    def _call_late(self) -> None:
        if self._late:
            late = self._late.pop(0)
            try:
                self._before[late[0]](*late)
            finally:
                self._call_late()


class Undoing:
    """Context manager that calls an undo function on exit; signal handlers wait for the undo function.

    Use the same object in two nested ``with`` blocks: if Ctrl-C interrupts ``__exit__`` of the inner block before the
    undo function is called, ``__exit__`` of the outer block calls the undo function.
    """

    __slots__ = ("_is_undone", "_undo")

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo, self._is_undone = undo, False

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        with DeferredSignals():
            if not self._is_undone:
                self._undo()
                self._is_undone = True
