"""Worker threads, one per device, and the mailbox through which they pass results to each other.

A result is a future. An error is not swallowed and does not end the interpreter: the first one stops the run, every
other thread leaves at its next wait, and the caller raises the error itself, with notes that state where it happened.
"""

from __future__ import annotations

import contextvars
import functools
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from typing import Any, ParamSpec, TypeVar

from ..errors import DeviceError

P = ParamSpec("P")
T = TypeVar("T")


class StoppedRun(BaseException):
    """Ends the work of a thread because the run has failed elsewhere. It never reaches the user."""


class Worker:
    """A thread that runs submitted work in order; it starts with the first piece of work.

    The thread ends with :meth:`close`, when the worker is collected, or with the interpreter, which waits for it.

    >>> worker = Worker("example")
    >>> worker.submit(pow, 2, 10).result()
    1024
    >>> worker.close()
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_closed = False
        self._start()
        _WORKERS.add(self)

    def _start(self) -> None:
        self._ident: int | None = None
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"roundpipe {self.name}")

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Return the future of ``work(*args, **kwargs)``, which sees the context variables of the caller."""
        bound = functools.partial(work, *args, **kwargs)
        try:
            return self._threads.submit(self._run, contextvars.copy_context(), bound)
        except RuntimeError as error:  # what an executor raises after its shutdown, and at the end of the interpreter
            raise DeviceError(
                f"{self.name} was closed, by this pipeline or by another one that shares it. Make a new pipeline:\n"
                "    RoundPipe(model, devices=...)"
            ) from error

    def is_here(self) -> bool:
        """Report whether the caller is this worker's own thread."""
        return threading.get_ident() == self._ident

    def _run(self, context: contextvars.Context, work: Callable[[], T]) -> T:
        self._ident = threading.get_ident()
        return context.run(work)

    def close(self) -> None:
        """Wait for the submitted work and end the thread. Later work is refused."""
        self.is_closed = True
        self._threads.shutdown(wait=True)


# Threads do not survive a fork, and an executor does not notice: in the child its work would never begin.
_WORKERS: weakref.WeakSet[Worker] = weakref.WeakSet()


def _start_again() -> None:
    for worker in list(_WORKERS):
        if not worker.is_closed:
            worker._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_again)


class Mailbox:
    """Passes results between the threads of one run, until one of them fails.

    >>> mailbox = Mailbox()
    >>> mailbox.put("x", 1)
    >>> mailbox.take("x")
    1
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[Hashable, Any] = {}
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        """The error that stopped the run, the first one of all threads."""
        return None if isinstance(self._error, StoppedRun) else self._error

    def put(self, key: Hashable, value: Any) -> None:
        """Store a value; a thread that waits for it continues."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def take(self, key: Hashable, *, keep: bool = False) -> Any:
        """Wait for a value and return it; it is gone from the mailbox afterwards, unless ``keep``."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._error is not None)
            self.check()
            return self._values[key] if keep else self._values.pop(key)

    def check(self) -> None:
        """Raise :class:`StoppedRun` if another thread has failed."""
        if self._error is not None:
            raise StoppedRun

    def fail(self, error: BaseException) -> None:
        """Stop the run. Only the first error counts, as it usually causes the later ones."""
        with self._changed:
            if self._error is None and not isinstance(error, StoppedRun):
                self._error = error
            self._changed.notify_all()

    def clear(self) -> None:
        """Release every value and the error, so that neither keeps memory alive.

        The run stays stopped: a stage of it that begins later must not wait for a value that never comes.
        """
        with self._changed:
            self._values.clear()
            self._error = StoppedRun()


def collect(mailbox: Mailbox, work: list[Future[None]]) -> None:
    """Wait until all work of a run has ended, then raise what stopped it.

    An interruption (Ctrl-C) while waiting also stops the run; the threads end their current layer first, so that
    nothing of this run is still under way when the caller gets the exception.
    """
    try:
        wait_for_futures(work)
    except BaseException as interruption:  # KeyboardInterrupt, or whatever a handler of the user raises
        mailbox.fail(interruption)
        wait_for_futures(work)
    error = mailbox.error
    if error is not None:
        mailbox.clear()
        try:
            raise error
        finally:
            del error  # else the traceback's frame would hold the exception that holds the traceback


def add_note_once(error: BaseException, note: str) -> None:
    """Add a note to an exception unless it has that note already."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
