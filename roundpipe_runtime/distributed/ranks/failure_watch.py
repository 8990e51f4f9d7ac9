"""Abort a call when another rank fails or is gone, or when the sums fail."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from ...device.interrupts import Uninterrupted
from ...engine.run import Run
from .alarm import Alarm
from .errors import StoppedByRankError

__all__ = ["News"]


class News:
    """Stops the run that is under way, and wakes up who waits for sums."""

    def __init__(self, alarm: Alarm) -> None:
        self._alarm = alarm
        self._run: Run | None = None
        self._reason: BaseException | None = None
        self._arrived: queue.SimpleQueue[BaseException | Future[None]] = queue.SimpleQueue()

    @property
    def reason(self) -> BaseException | None:
        """Why the call that is under way stops; ``None`` while it goes on."""
        return self._reason

    @contextlib.contextmanager
    def listening(self, number: Callable[[], int]) -> Iterator[None]:
        """Hear the other ranks during a call."""
        # number: function that returns the number of the call; news of others do not concern it

        def hear(failed: int | None) -> None:
            if failed in (None, number()):
                self._stop(StoppedByRankError("Another rank has failed."))

        self._run = self._reason = None
        self._arrived = queue.SimpleQueue()
        self._alarm.listen(hear)
        try:
            yield
        finally:
            self._alarm.listen(None)
            self._reason = None

    @contextlib.contextmanager
    def stopping(self, run: Run) -> Iterator[None]:
        """Let news stop a run."""
        self._run = run
        try:
            if self._reason is not None:
                raise self._reason
            yield
        finally:
            self._run = None

    def watch(self, summed: Future[None]) -> Future[None]:
        """Stop the call if the sums fail; return them."""
        with Uninterrupted():
            summed.add_done_callback(self._when_summed)
        return summed

    def wait(self, summed: Future[None]) -> None:
        """Wait for the sums, or for a reason to stop."""
        with Uninterrupted(stop=self._arrived.put):
            found = self._arrived.get()
            if isinstance(found, BaseException):
                raise found
            summed.result()

    def _when_summed(self, summed: Future[None]) -> None:
        if error := summed.exception():
            self._stop(error)
        self._arrived.put(summed)

    def _stop(self, reason: BaseException) -> None:
        self._reason = reason
        run = self._run
        if run is not None:
            run.mailbox.fail(reason)
        self._arrived.put(reason)
