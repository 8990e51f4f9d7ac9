"""Moments in the work of a device, seen as futures."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["NOW", "Event"]


class Event(Protocol):
    """A moment in the work of a device, seen as a future."""

    def done(self) -> bool:
        """Tell whether it has passed."""

    def result(self) -> Any:
        """Wait until it has passed."""


class _Passed:
    """An event that has passed."""

    def done(self) -> bool:
        """Yes."""
        return True

    def result(self) -> None:
        """Return at once."""


NOW = _Passed()
