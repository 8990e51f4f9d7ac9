"""Run code from a file (a chat template, a regular expression) in a process with limits on time and memory.

On a system without ``fork`` (Windows), the code runs without limits in the calling process.
"""

# caller                         forked at the first call
#   | ---- arguments ----------->  |   at most 3 CPU seconds a call, and 1 GB more memory than the caller has
#   | <--- result, or its error -  |
#  the object is deleted           exits, since the pipe is closed

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import os
import pickle
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_CPU_SECONDS = 3
_SECONDS = 30.0  # a deadline for busy machines
_MEMORY = 2**30  # bytes in addition to those of the caller
_MOST = 2**26  # bytes of a result


class LimitError(RuntimeError):
    """A function call took too long, needed too much memory, or returned too much data."""


def limited(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function once, in another process where possible, with limits on time, memory and the result's size.

    >>> limited(sum, [1, 2, 3])
    6
    """
    return Limited(function)(*args, **kwargs)


class Limited(Generic[P, T]):
    """A function that runs, with limits on time and memory, in a forked process; errors are raised in the caller."""

    def __init__(self, function: Callable[P, T]) -> None:
        self._function, self._lock = function, threading.Lock()
        self._child: _Child | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if not hasattr(os, "fork"):
            return self._function(*args, **kwargs)
        with self._lock:
            if self._child is None or self._child.owner != os.getpid():
                self._child = _Child(self._function)
            answer = self._child.ask((args, kwargs))
            if answer is None:
                self._child = None
        if answer is None:
            raise LimitError(f"the call needed over {_CPU_SECONDS} CPU seconds or {_MEMORY / 1e9:.1f} GB of memory")
        is_result, found = answer
        if not is_result:
            raise found
        result: T = found
        return result


class _Child:
    """A forked process that runs the function for each call, and ends when the ``_Child`` object is deleted."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.owner = os.getpid()
        self._connection, theirs = multiprocessing.Pipe()
        with warnings.catch_warnings():
            # Python and JAX warn that a fork copies the locks of threads; templates and patterns use no such lock
            warnings.simplefilter("ignore")
            number = os.fork()
        if not number:
            _serve(theirs, function)
        theirs.close()
        self.end = weakref.finalize(self, _end, self.owner, number, self._connection)

    def ask(self, arguments: object) -> tuple[bool, Any] | None:
        """Return ``(True, result)`` or ``(False, error)`` of a function call; ``None`` if the process ended."""
        try:
            self._connection.send(arguments)
            if self._connection.poll(_SECONDS):
                answer: tuple[bool, Any] = pickle.loads(self._connection.recv_bytes())  # written by `_serve`
                return answer
        except (EOFError, ConnectionError):
            pass
        except BaseException:  # also Ctrl-C; the answer to this call would be read as the answer to the next call
            self.end()
            raise
        self.end()
        return None


def _end(owner: int, number: int, connection: Connection) -> None:
    if os.getpid() != owner:
        return  # a fork of the caller, which does not own the process
    connection.close()
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)


def _serve(connection: Connection, function: Callable[..., Any]) -> None:
    try:
        gc.freeze()  # a collection would run finalizers of the caller's objects
        import resource

        # files of the caller would otherwise stay open, and locked, until this process ends
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, 2**16)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of tokenizers do not exist in a fork
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # only Linux reports the memory of a process
            with open("/proc/self/statm", encoding="ascii") as file:
                held = int(file.read().split()[0]) * resource.getpagesize()
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            wanted = held + _MEMORY if most == resource.RLIM_INFINITY else min(held + _MEMORY, most)
            resource.setrlimit(resource.RLIMIT_AS, (wanted, most))
        while True:
            args, kwargs = connection.recv()
            used = resource.getrusage(resource.RUSAGE_SELF)
            seconds = math.ceil(used.ru_utime + used.ru_stime) + _CPU_SECONDS
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
            try:
                answer = pickle.dumps((True, function(*args, **kwargs)))
                if len(answer) > _MOST:
                    raise LimitError(f"the call returned {len(answer) / 1e6:.0f} MB; the limit is {_MOST / 1e6:.0f} MB")
            except MemoryError:
                answer = pickle.dumps((False, LimitError(f"the call needs more than {_MEMORY / 1e9:.1f} GB of memory")))
            except Exception as error:  # it is raised in the caller
                found: Exception | None = None
                with contextlib.suppress(Exception):
                    pickle.loads(pickle.dumps(error))  # fails for errors that pickle cannot copy
                    found = error
                if found is None:
                    found = RuntimeError(f"{type(error).__name__}: {error}")
                answer = pickle.dumps((False, found))
            connection.send_bytes(answer)
    finally:
        os._exit(0)  # also after an error: the child never returns to the code of the caller
