"""Events of a device, with the interface of futures."""

from __future__ import annotations

from typing import Any, Protocol


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
