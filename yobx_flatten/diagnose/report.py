"""A report on what was compared: whether it is within its tolerance, the largest difference, and a table of it."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence

__all__ = ["Report", "table"]


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


def table(rows: Iterable[Sequence[str]], *, indent: str = "  ") -> list[str]:
    """Align rows of cells in columns.

    Args:
        rows: the cells of each row; the first row may be a header. The last cell of a row is as long as it is, so a row
            may end early with a sentence.
        indent: what every line begins with; two spaces by default.

    Returns:
        The lines.

    >>> for line in table([["case", "steps", "worst"], ["batch 3", "2", "logits"], ["batch 12", "why"]], indent="| "):
    ...     print(line)
    | case      steps  worst
    | batch 3   2      logits
    | batch 12  why
    """
    cells = [list(row) for row in rows]
    widths: dict[int, int] = {}
    for row in cells:
        for column, cell in enumerate(row[:-1]):
            widths[column] = max(widths.get(column, 0), len(cell))
    lines = ("  ".join([*(cell.ljust(widths[c]) for c, cell in enumerate(row[:-1])), *row[-1:]]) for row in cells)
    return [f"{indent}{line}".rstrip() for line in lines]
