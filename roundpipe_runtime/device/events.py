"""Events of a device, with the interface of futures."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch


class Event(Protocol):
    """An event of a device, with the interface of a future."""

    def done(self) -> bool:
        """Report whether the event has passed."""

    def result(self) -> Any:
        """Wait until the event has passed."""


class _Passed:
    """An event that has passed."""

    def done(self) -> bool:
        """Return ``True``."""
        return True

    def result(self) -> None:
        """Return at once."""


NOW = _Passed()


# Measure the work of a device: by the host's clock, or by events in an accelerator's streams.


class Clock(Protocol):
    """A clock of one device, for one run."""

    @property
    def is_late(self) -> bool:
        """Whether moments are known only when the device has ended its work."""

    def now(self, kind: str) -> float | torch.Event:
        """Return an event for the beginning or the end of work on a device."""
        # kind: kind of work, as in a timeline: `"forward"`, `"backward"`, `"upload"` and so on

    def seconds(self, moment: float | torch.Event) -> float:
        """Return a time in seconds, on the clock of ``time.perf_counter``."""


class HostClock:
    """The clock of a device that has done its work when the call returns."""

    is_late = False

    def now(self, kind: str) -> float:
        """Return the moment, which is known at once."""
        return time.perf_counter()

    def seconds(self, moment: float | torch.Event) -> float:
        """Return the moment itself."""
        assert isinstance(moment, float)
        return moment


HOST_CLOCK = HostClock()


class EventClock:
    """The clock of an accelerator: moments are events in its streams."""

    is_late = True

    def __init__(self, device: torch.device, stream: torch.Stream, others: Mapping[str, torch.Stream]) -> None:
        self._device, self._stream, self._others = device, stream, others
        self._start = time.perf_counter()
        self._first = self._record(stream)

    def _record(self, stream: torch.Stream) -> torch.Event:
        return stream.record_event(torch.Event(self._device, enable_timing=True))

    def now(self, kind: str) -> torch.Event:
        """Return an event of the stream in which this work runs."""
        return self._record(self._others.get(kind, self._stream))

    def seconds(self, moment: float | torch.Event) -> float:
        """Return when the stream passed an event; it has passed."""
        assert not isinstance(moment, float)
        return self._start + self._first.elapsed_time(moment) / 1e3
