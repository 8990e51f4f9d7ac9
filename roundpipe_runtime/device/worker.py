"""Run the work of each device in a separate thread."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from functools import partial
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch

from ..errors import DeviceError

P = ParamSpec("P")
T = TypeVar("T")


class StoppedRun(BaseException):
    """Raised in a thread when the forward or backward pass failed in another thread; users never see this exception."""


class Worker:
    """A thread that runs submitted functions in order; the thread starts when the first one is submitted."""

    # The thread ends at `close`, when the worker is garbage-collected, or at the end of the program, which waits for
    # the thread.

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_closed = False
        self._start()
        _WORKERS.add(self)

    def _start(self) -> None:
        self._ident: int | None = None
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"roundpipe {self.name}")

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit ``work(*args, **kwargs)`` with the context variables and the number of torch threads of the caller."""
        bound = functools.partial(work, *args, **kwargs)
        try:
            return self._threads.submit(self._run, contextvars.copy_context(), torch.get_num_threads(), bound)
        except RuntimeError as error:  # raised after the shutdown of the executor, and at the end of the interpreter
            raise DeviceError(
                f"Device {self.name} was closed, by this pipeline or by another that uses it. Make a new pipeline:\n"
                "    RoundPipe(model, devices=...)"
            ) from error

    def is_here(self) -> bool:
        return threading.get_ident() == self._ident

    def _run(self, context: contextvars.Context, torch_threads: int, work: Callable[[], T]) -> T:
        self._ident = threading.get_ident()
        # Each thread has its own number, and a new thread uses all cores until the getter is called. On some CPUs the
        # last bits of a product of matrices depend on the number.
        if torch.get_num_threads() != torch_threads:
            torch.set_num_threads(torch_threads)
        return context.run(work)

    def close(self) -> None:
        """Wait for the submitted work and end the thread. Submitting work to a closed worker raises an error."""
        self.is_closed = True
        self._threads.shutdown(wait=True)


_WORKERS: weakref.WeakSet[Worker] = weakref.WeakSet()


class Mailbox:
    """Passes results between the threads of one forward or backward pass, until one of the threads fails."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[Hashable, Any] = {}
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        return None if isinstance(self._error, StoppedRun) else self._error

    def put(self, key: Hashable, value: Any) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def take(self, key: Hashable, *, keep: bool = False) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._error is not None)
            self.check()
            return self._values[key] if keep else self._values.pop(key)

    def check(self) -> None:
        if self._error is not None:
            raise StoppedRun

    def fail(self, error: BaseException) -> None:
        """Stop all threads with an error; only the first error is raised, because it usually causes later errors."""
        with self._changed:
            if self._error is None and not isinstance(error, StoppedRun):
                self._error = error
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:  # the run stays stopped, since later values never come
            self._values.clear()
            self._error = StoppedRun()


def collect(mailbox: Mailbox, work: list[Future[None]]) -> None:
    """Wait for the end of all threads of a forward or backward pass, then raise the error that occurred first."""
    # Ctrl-C during the wait stops each thread after its current layer
    try:
        wait_for_futures(work)
    except BaseException as interruption:  # KeyboardInterrupt, or an exception of the user's signal handler
        mailbox.fail(interruption)
        wait_for_futures(work)
    error = mailbox.error
    if error is not None:
        mailbox.clear()
        try:
            raise error
        finally:
            del error  # avoids a reference cycle of exception, traceback and frame


def add_note_once(error: BaseException, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


class Outcome:
    """A context manager that stores the error of its with block, to be raised after other ranks are notified."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Outcome:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> bool:
        self.error = error
        return True


@contextlib.contextmanager
def on_error(act: Callable[[BaseException], object]) -> Iterator[None]:
    """Call ``act`` with an error of the with block, for example to undo changes, before the error propagates."""
    try:
        yield
    except BaseException as error:  # BaseException: changes must also be undone after Ctrl-C
        act(error)
        raise


def noting(note: str) -> contextlib.AbstractContextManager[None]:
    return on_error(partial(add_note_once, note=note))


L = TypeVar("L")

_LOCKS: list[Any] = []


def free_after_fork(lock: L) -> L:
    """Register a lock to be released in forked processes, where the thread that holds the lock does not exist."""
    _LOCKS.append(lock)
    return lock


def _start_again() -> None:
    for worker in list(_WORKERS):
        if not worker.is_closed:
            worker._start()
    for lock in _LOCKS:
        lock._at_fork_reinit()  # the standard library does the same with its locks


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_start_again)


class Uninterrupted:
    """A context manager that defers ``KeyboardInterrupt`` to the end of the with block."""

    # Python raises `KeyboardInterrupt` in its SIGINT handler, between any two lines of the main thread. In the main
    # thread, the with block replaces the Python handler of SIGINT, if there is one; in other threads it does nothing.
    # stop: called at once with the exception of the handler, to make the block end soon, whose end raises the exception
    # if the block raises no error. Later signals are ignored. Without `stop`, the handler is called at the end.

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
            except BaseException as error:  # KeyboardInterrupt, or an exception of the user's signal handler
                self._error = error
                self._stop(error)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self._before is None:
            return
        signal.signal(signal.SIGINT, self._before)
        late, pending, self._error = self._late, self._error, None
        if late is not None:
            self._before(*late)
        if pending is not None and error is None:
            raise pending


def wait_for(future: Future[T]) -> T:
    """Wait until a future is done and return its result; Ctrl-C ends the wait, but not the work."""
    # Ctrl-C during `Future.result` can raise `RuntimeError`, or leave the lock of the future locked
    # (https://github.com/python/cpython/issues/78667)
    news: queue.SimpleQueue[object] = queue.SimpleQueue()  # signal handlers can use a SimpleQueue
    with Uninterrupted(stop=news.put):
        future.add_done_callback(news.put)
        if news.get() is future:
            return future.result()
    raise KeyboardInterrupt  # not reached, since the block raises the exception of the handler


def is_done(future: Future[Any]) -> bool:
    """Return whether a future is done; unlike in ``Future.done``, Ctrl-C cannot leave the future locked."""
    with Uninterrupted():
        return future.done()


def error_of(future: Future[Any]) -> BaseException | None:
    with Uninterrupted():
        return future.exception() if future.done() else None


# The default CPU random generator of torch is one for all threads: threads lock it, and restore its state.

# A layer that holds the lock may call another pipeline and wait for its threads. These threads inherit a context
# variable with a second lock, which they share instead.
_CPU_GENERATOR = free_after_fork(threading.RLock())
_INSIDE: contextvars.ContextVar[Any] = contextvars.ContextVar("roundpipe_generator_inside", default=None)


def generator_lock() -> Any:
    return _INSIDE.get() or _CPU_GENERATOR


@contextlib.contextmanager
def generator_alone(timeout: float = -1) -> Iterator[None]:
    """Reserve the CPU random generator of torch for this thread, and for threads of pipelines that it calls."""
    # timeout: seconds to wait for the lock. Default: no limit.
    lock = generator_lock()
    if not lock.acquire(timeout=timeout):
        raise TimeoutError(f"Gave up after {timeout} s: another thread still uses torch's CPU random generator.")
    try:
        inside = _INSIDE.set(threading.RLock())
        try:
            yield
        finally:
            _INSIDE.reset(inside)
    finally:
        lock.release()


@contextlib.contextmanager
def generator_kept(timeout: float = -1) -> Iterator[None]:
    # Without the lock, the restored state could be that of a layer in another thread.
    with generator_alone(timeout), torch.random.fork_rng(devices=[]):
        yield
