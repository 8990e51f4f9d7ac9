"""Lock torch's default CPU random generator, which all threads share, and restore the generator's state."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import torch

from .worker import free_after_fork

# A layer that holds the lock may call another pipeline and wait for its threads. These threads inherit a context
# variable with a second lock, which they share instead.
_CPU_GENERATOR = free_after_fork(threading.RLock())
_INSIDE: contextvars.ContextVar[Any] = contextvars.ContextVar("roundpipe_generator_inside", default=None)


def generator_lock() -> Any:
    """Return the lock that this thread must hold to use torch's CPU random generator."""
    return _INSIDE.get() or _CPU_GENERATOR


@contextlib.contextmanager
def generator_alone(timeout: float = -1) -> Iterator[None]:
    """Reserve torch's CPU random generator for this thread, and for threads of its pipelines, in the with block."""
    # timeout: seconds to wait for the lock. Default: no limit.
    lock = generator_lock()
    if not lock.acquire(timeout=timeout):
        raise TimeoutError(f"Another thread held the CPU's random generator for more than {timeout} s.")
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
    """Reserve torch's CPU random generator for this thread in the with block, and restore its state afterwards."""
    # Without the lock, the restored state could be that of a layer in another thread.
    with generator_alone(timeout), torch.random.fork_rng(devices=[]):
        yield
