"""A report on what was compared: whether it is within its tolerance, the largest difference, and a table of it."""

from __future__ import annotations

import abc
from collections.abc import Iterable

__all__ = ["Report"]


class Report(abc.ABC):
    """Base of all reports on a comparison. ``print(report)`` shows it as a table.

    Attributes:
        tolerance: largest absolute difference allowed.
    """

    tolerance: float

    @abc.abstractmethod
    def differences(self) -> Iterable[float]:
        """Return every difference that counts, infinite where something stopped or cannot be compared."""

    @abc.abstractmethod
    def __str__(self) -> str:
        """Return the report as a table."""

    @property
    def max_difference(self) -> float:
        """The largest difference; infinite when something stopped or cannot be compared."""
        return max(self.differences(), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether every difference is within the tolerance."""
        return self.max_difference <= self.tolerance
