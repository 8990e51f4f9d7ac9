"""Detect that another rank has failed, ended or was stopped, and raise an error in the current call of this rank.

A failed rank writes a message to the key-value store of ``torch.distributed``, which a thread of every rank reads ten
times a second. A gloo collective waits until the job's timeout for a process that a signal (SIGSTOP) has stopped.
Therefore a watchdog thread of each rank kills processes of its machine that were stopped for ``Alarm.patience``
seconds. If a process on another machine sends no heartbeat for this time, the rank closes all connections.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ...device.worker import Uninterrupted
from ...engine.run import Run
from ...errors import StoppedByRankError

_PERIOD = 0.1  # seconds between two reads of the store, so that an exception is raised on all ranks within a second
_LOOK = 0.5  # seconds between two checks for stopped processes
_BEAT = 5.0  # largest number of seconds between two beats
_RECENT = 10.0  # seconds after a stop in which the end of a process is attributed to the stop
_PATIENCE = 3.0  # seconds in which a live rank on another machine answers
_LEFT = "left"  # last beat of a process that stops listening


class Alarm:
    """Notifies the other ranks when this rank fails, and detects ranks whose processes have ended or are stopped."""

    # store: store of the job, `None` for a process alone

    patience = 120.0
    """Seconds for which a process may be stopped before other processes kill it or close their connections to it."""

    def __init__(self, store: Any, rank: int, size: int, prefix: str = "") -> None:
        self._store, self._rank, self._size = store, rank, size
        self._prefix = f"roundpipe/{prefix}"
        self._listener: Callable[[int | None], None] | None = None
        self._gone: list[int] | None = None
        self._step_failure: tuple[int, str] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._here = Process.here()
        self._processes: dict[int, Process] = {}
        self._stopped: dict[int, float] = {}  # seconds for which ranks have been stopped until now
        self._last_stop: dict[int, tuple[float, float]] = {}  # seconds of the last stop, and when it was seen
        self._heard = self._known = (rank, "")  # rank on another machine and its last beat; a new tuple per answer
        self._waited = self._silent = 0.0  # seconds since the last answer of the store, and since the last new beat
        self._next_beat = 0.0
        if store is not None and size > 1:
            store.set(f"{self._prefix}/process/{rank}", json.dumps(self._here))
            given = (weakref.ref(self),)
            self._thread = threading.Thread(target=_listen, args=given, name="roundpipe alarm", daemon=True)
            self._thread.start()
            threading.Thread(target=_watch, args=given, name="roundpipe watch", daemon=True).start()
            _ALARMS.add(self)

    def listen(self, listener: Callable[[int | None], None] | None) -> None:
        # listener: function that gets the number of the failed call; `None` if a rank is gone
        with self._lock:
            self._listener = listener

    def take_step_failure(self) -> tuple[int, str] | None:
        """Return the rank and the error of a failed optimizer step; ``None`` if no step failed."""
        deadline = time.monotonic() + 10 * _PERIOD
        while self._step_failure is None and self._gone is None and time.monotonic() < deadline:
            time.sleep(_PERIOD / 4)
        found, self._step_failure = self._step_failure, None
        return found

    def find_gone(self) -> list[int]:
        """Return the ranks that do not answer a message; return rank 0 if the key-value store on it does not answer."""
        if self._gone is None and self._store is not None and self._size > 1:
            try:
                self._gone = self._ask() or None
                if self._gone:
                    self.send({"gone": self._gone})
            except RuntimeError:
                self._gone = [0] if self._rank else []  # rank 0 or its machine runs the store
        return self._gone or []

    def _ask(self) -> list[int]:
        question = f"{self._rank}/{time.time_ns()}"
        self.send({"question": question})
        missing = set(range(self._size)) - {self._rank}
        deadline = time.monotonic() + _PATIENCE
        while missing and self._gone is None and time.monotonic() < deadline:
            missing -= {rank for rank in missing if self._store.check([f"{self._prefix}/here/{question}/{rank}"])}
            if ended := self._ended():
                return ended
            time.sleep(_PERIOD / 4)
        return sorted(missing) if self._gone is None else self._gone

    def seconds_stopped(self, rank: int) -> float:
        """Return for how many seconds the process of a rank was recently stopped by a signal (SIGSTOP)."""
        seconds, seen = self._last_stop.get(rank, (0.0, 0.0))
        return seconds if time.monotonic() - seen < _RECENT else 0.0

    def _neighbours(self) -> list[tuple[int, Process]]:
        known = sorted(self._processes.items())
        return [(rank, one) for rank, one in known if rank != self._rank and not self._is_far(rank)]

    def _is_far(self, rank: int) -> bool:
        return rank in self._processes and self._processes[rank].machine != self._here.machine

    def _ended(self) -> list[int]:
        return [rank for rank, one in self._neighbours() if one.has_ended()]

    def _end_stopped(self) -> None:
        """Kill processes on this machine that have been stopped (SIGSTOP) for longer than ``patience`` seconds."""
        for rank, one in self._neighbours():
            if one.is_stopped():
                # count the checks instead of reading the clock, since this process may also have been stopped
                self._stopped[rank] = self._stopped.get(rank, 0.0) + _LOOK
                self._last_stop[rank] = self._stopped[rank], time.monotonic()
                if self._stopped[rank] > self.patience:
                    with contextlib.suppress(OSError):
                        os.kill(one.number, signal.SIGKILL)
            else:
                self._stopped.pop(rank, None)

    def _beat(self) -> None:
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + min(_BEAT, self.patience / 8)
        self._store.set(f"{self._prefix}/beat/{self._rank}", str(time.monotonic()))
        far = next(filter(self._is_far, [*range(self._rank, self._size), *range(self._rank)]), self._rank)
        if self._store.check([f"{self._prefix}/beat/{far}"]):
            self._heard = far, self._store.get(f"{self._prefix}/beat/{far}").decode()

    def _give_up_silent(self) -> None:
        """Close all connections if a process on another machine has sent no heartbeat for ``patience`` seconds."""
        self._waited += _LOOK
        known, self._known = self._known, self._heard
        if self._known is not known:  # the store has answered
            is_silent = self._known == known and known[1] != _LEFT
            self._silent, self._waited = self._silent + self._waited if is_silent else 0.0, 0.0
        # the store is in the process of rank 0, or in torchrun on the same machine
        rank, seconds = (known[0], self._silent) if self._silent > self._waited else (0, self._waited)
        if self._gone is None and seconds > self.patience and self._is_far(rank):
            if not self._waited:  # otherwise the other ranks would report this process as the cause
                self.send({"gone": [rank], "seconds": seconds})
            self._gone, self._last_stop[rank] = [rank], (seconds, time.monotonic())
            self._hear(None)
        if any(self._is_far(rank) and self.seconds_stopped(rank) for rank in self._gone or ()):
            self.close()
            time.sleep(3 * _PERIOD)  # until the other ranks are notified, and the listener no longer uses the store
            # shut down all TCP connections of this process (Linux only), so that threads that wait in gloo get an error
            for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else ():
                with contextlib.suppress(OSError):  # already closed, or a listening socket: gloo ends the process then
                    if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                        with socket.socket(fileno=os.dup(int(name))) as one:
                            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername():
                                one.shutdown(socket.SHUT_RDWR)

    def _look(self) -> None:
        for rank in range(self._size):
            key = f"{self._prefix}/process/{rank}"
            if rank not in self._processes and self._store.check([key]):
                self._processes[rank] = Process(*json.loads(self._store.get(key)))
        if self._listener is not None and self._gone is None and (ended := self._ended()):
            self._gone = ended
            self.send({"gone": ended})
            self._hear(None)

    def _lose_store(self) -> None:
        """After torch's key-value store has failed, stop the current call if a rank's process ends within a second."""
        deadline = time.monotonic() + 10 * _PERIOD  # the kernel may report the end of a process late
        while self._listener is not None and self._gone is None and time.monotonic() < deadline:
            if ended := self._ended():
                self._gone = ended
                self._hear(None)
            time.sleep(_PERIOD / 4)

    def _hear(self, call: int | None) -> None:
        with self._lock:
            listener = self._listener
        if listener is not None:
            listener(call)

    def close(self) -> None:
        self._closed.set()

    def send(self, news: dict[str, Any]) -> None:
        if self._store is not None and self._size > 1 and not self._closed.is_set():
            number = self._store.add(f"{self._prefix}/count", 1)
            self._store.set(f"{self._prefix}/news/{number}", json.dumps({**news, "rank": self._rank}))

    def _take(self, number: int) -> bool:
        """Handle the message with the given number; return ``False`` if no rank has sent that message yet."""
        key = f"{self._prefix}/news/{number}"
        if not self._store.check([key]):
            return False
        news = json.loads(self._store.get(key))
        if news["rank"] == self._rank:
            return True
        if "question" in news:
            self._store.set(f"{self._prefix}/here/{news['question']}/{self._rank}", "yes")
            return True
        if "step" in news:
            self._step_failure = news["rank"], news["step"]
            return True
        if "gone" in news and self._gone is None:
            self._gone = news["gone"]
            if "seconds" in news:
                self._last_stop |= {rank: (news["seconds"], time.monotonic()) for rank in self._gone}
        self._hear(news.get("call"))
        return True


def _watch(alarm: weakref.ref[Alarm]) -> None:
    while (found := alarm()) is not None and not found._closed.is_set():
        found._end_stopped()
        found._give_up_silent()  # also works while the store does not answer
        closed = found._closed
        del found
        closed.wait(_LOOK)


_ALARMS: weakref.WeakSet[Alarm] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # a thread in the C++ code of the store of `torch.distributed` would crash the exit of the interpreter
    for alarm in list(_ALARMS):
        alarm.close()
        alarm._thread.join(1.0)


def _listen(alarm: weakref.ref[Alarm]) -> None:
    number, found = 1, alarm()
    assert found is not None
    leave = partial(found._store.set, f"{found._prefix}/beat/{found._rank}", _LEFT)
    closed = found._closed
    while found is not None and not closed.is_set():
        try:
            while found._take(number):
                number += 1
            found._look()
            found._beat()
        except (RuntimeError, ValueError):  # the next collective reports the error
            found._lose_store()
            return
        del found
        closed.wait(_PERIOD)
        found = alarm()
    with contextlib.suppress(RuntimeError, ValueError):
        leave()


_ENDED = ("Z", "X")  # states of an ended process


def this_machine() -> str:
    """Return a name that all processes on this machine share; without ``/proc``, the name is unique per process."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    return f"{socket.gethostname()} {os.getpid()}"


class Process(NamedTuple):
    machine: str  # name of the machine
    number: int  # number of the process
    started: str  # start time in kernel units, since process ids are reused

    @classmethod
    def here(cls) -> Process:
        return cls(this_machine(), os.getpid(), _state(os.getpid())[1])

    def has_ended(self) -> bool:
        state, started = _state(self.number)
        return state in _ENDED or started != self.started

    def is_stopped(self) -> bool:
        return _state(self.number) == ("T", self.started)  # "t" is a process in a debugger


def _state(number: int) -> tuple[str, str]:
    """Return the state and the start time of a process as Linux reports them, with ``"X"`` for an ended process."""
    with contextlib.suppress(OSError):
        # the program name, in parentheses, may contain spaces and parentheses
        fields = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0], fields[19]
    return "X" if Path("/proc/self/stat").exists() else "", ""


class News:
    """Stops a pipeline call on this rank when another rank fails during the call."""

    def __init__(self) -> None:
        self.reason: BaseException | None = None
        self._run: Run | None = None
        self._arrived: queue.SimpleQueue[BaseException | Future[None]] = queue.SimpleQueue()

    @classmethod
    @contextlib.contextmanager
    def listening(cls, alarm: Alarm, number: int) -> Iterator[News]:
        # number: number of the call; errors of other calls are ignored
        # Other threads may deliver an error after the next call has begun, so each call has a separate object.
        call = cls()

        def hear(failed: int | None) -> None:
            if failed in (None, number):
                call._stop(StoppedByRankError("Another rank has failed."))

        alarm.listen(hear)
        try:
            yield call
        finally:
            alarm.listen(None)

    def _stop(self, reason: BaseException) -> None:
        self.reason = reason
        run = self._run
        if run is not None:
            run.mailbox.fail(reason)
        self._arrived.put(reason)

    @contextlib.contextmanager
    def stopping(self, run: Run) -> Iterator[None]:
        self._run = run
        try:
            if self.reason is not None:
                raise self.reason
            yield
        finally:
            self._run = None

    def watch(self, summed: Future[None]) -> Future[None]:
        def note(summed: Future[None]) -> None:
            if error := summed.exception():
                self._stop(error)
            self._arrived.put(summed)

        with Uninterrupted():
            summed.add_done_callback(note)
        return summed

    def wait(self, summed: Future[None]) -> None:
        with Uninterrupted(stop=self._arrived.put):
            found = self._arrived.get()
            if isinstance(found, BaseException):
                raise found
            summed.result()
