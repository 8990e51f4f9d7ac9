"""Abort a call when another rank fails or is gone, or when the sums fail."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from concurrent.futures import Future

from ...device.worker import Uninterrupted
from ...engine.run import Run
from .alarm import Alarm
from .errors import StoppedByRankError


class _CallNews:
    """State of one call: its run, and why it stops."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.reason: BaseException | None = None
        self.arrived: queue.SimpleQueue[BaseException | Future[None]] = queue.SimpleQueue()

    def stop(self, reason: BaseException) -> None:
        """Stop the run, and wake up who waits for the sums."""
        self.reason = reason
        run = self.run
        if run is not None:
            run.mailbox.fail(reason)
        self.arrived.put(reason)

    def note_sums(self, summed: Future[None]) -> None:
        """Wake up who waits for the sums; stop the call if they have failed."""
        if error := summed.exception():
            self.stop(error)
        self.arrived.put(summed)


class News:
    """Stops the run that is under way, and wakes up who waits for sums."""

    def __init__(self, alarm: Alarm) -> None:
        self._alarm = alarm
        self._call = _CallNews()

    @property
    def reason(self) -> BaseException | None:
        """Why the call that is under way stops; ``None`` while it continues."""
        return self._call.reason

    @contextlib.contextmanager
    def listening(self, number: int) -> Iterator[None]:
        """Hear the other ranks during a call."""
        # number: number of the call; news of others do not concern it
        # Other threads deliver news, and may do so when the next call has begun: each call has its own object.
        call = self._call = _CallNews()

        def hear(failed: int | None) -> None:
            if failed in (None, number):
                call.stop(StoppedByRankError("Another rank has failed."))

        self._alarm.listen(hear)
        try:
            yield
        finally:
            self._alarm.listen(None)
            self._call = _CallNews()

    @contextlib.contextmanager
    def stopping(self, run: Run) -> Iterator[None]:
        """Let news stop a run."""
        call = self._call
        call.run = run
        try:
            if call.reason is not None:
                raise call.reason
            yield
        finally:
            call.run = None

    def watch(self, summed: Future[None]) -> Future[None]:
        """Stop the call if the sums fail; return them."""
        with Uninterrupted():
            summed.add_done_callback(self._call.note_sums)
        return summed

    def wait(self, summed: Future[None]) -> None:
        """Wait for the sums, or for a reason to stop."""
        arrived = self._call.arrived
        with Uninterrupted(stop=arrived.put):
            found = arrived.get()
            if isinstance(found, BaseException):
                raise found
            summed.result()
