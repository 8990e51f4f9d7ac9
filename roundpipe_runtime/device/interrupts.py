"""Defer SIGINT (Ctrl-C) during critical sections."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class Uninterrupted:
    """A context manager that defers ``KeyboardInterrupt`` to its end.

    Python raises it from its handler of SIGINT, between any two lines of the main thread. During the block
    another handler is installed. In other threads, and where Python has no handler, the block does nothing.

    ::

        with Uninterrupted():
            for parameter, gradient in found:  # all or none
                parameter.grad = gradient
    """

    # stop: called at once with what the handler raises, to make the block end soon; the block raises it, or else its
    # end does. Later signals change nothing. Without `stop` the handler is called at the end of the block.

    __slots__ = ("_before", "_error", "_late", "_stop")

    def __init__(self, stop: Callable[[BaseException], None] | None = None) -> None:
        self._stop = stop
        self._before: Any = None
        self._late: tuple[int, FrameType | None] | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._stop is None:
            self._late = number, frame
        elif self._error is None:
            try:
                self._before(number, frame)
            except BaseException as error:  # KeyboardInterrupt, or whatever a handler of the user raises
                self._error = error
                self._stop(error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is None:
            return
        signal.signal(signal.SIGINT, self._before)
        late, pending, self._error = self._late, self._error, None
        if late is not None:
            self._before(*late)
        if pending is not None and error is None:
            raise pending


def wait_for(future: Future[T]) -> T:
    """Wait until a future is done and return its result; Ctrl-C ends only the wait.

    ``Future.result`` waits on a condition: an interruption between two lines of that comes out as ``RuntimeError``, or
    leaves the lock with a thread that has gone on (https://github.com/python/cpython/issues/78667).

    >>> future = Future()
    >>> future.set_result(3)
    >>> wait_for(future)
    3
    """
    news: queue.SimpleQueue[object] = queue.SimpleQueue()  # a handler of signals may put something into it at any time
    with Uninterrupted(stop=news.put):
        future.add_done_callback(news.put)
        if news.get() is future:
            return future.result()
    raise KeyboardInterrupt  # the block has raised what the handler did


def is_done(future: Future[Any]) -> bool:
    """Report whether a future is done; the main thread asks here, as it waits in :func:`wait_for`.

    ``Future.done`` takes the lock that ``set_result`` needs: an interruption in between leaves it taken for ever.
    """
    with Uninterrupted():
        return future.done()


def error_of(future: Future[Any]) -> BaseException | None:
    """Return the error of a future that has failed; ``None`` while it is not done, and if it has a result."""
    with Uninterrupted():
        return future.exception() if future.done() else None
