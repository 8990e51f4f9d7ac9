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


def table(rows: Iterable[Sequence[str]], *, align: str = "", indent: str = "  ", width: int | None = None) -> list[str]:
    """Align rows of cells in columns.

    Args:
        rows: the cells of each row; the first row can be a header. The last cell of a row is as long as it is, so a row
            can end early with a sentence.
        align: one sign per column, ``"<"`` for the left and ``">"`` for the right. Default: all to the left.
        indent: what every line begins with; two spaces by default.
        width: most characters of a line, for which the first cells are shortened at their start. Default: no limit.

    Returns:
        The lines.

    >>> for line in table([["case", "steps", "worst"], ["batch 3", "2", "logits"], ["batch 12", "why"]], indent="| "):
    ...     print(line)
    | case      steps  worst
    | batch 3   2      logits
    | batch 12  why
    >>> for line in table([["model.layers.0", "9 MB"], ["head", "12.5 MB"]], align="<>", indent="| ", width=20):
    ...     print(line)
    | ...yers.0     9 MB
    | head       12.5 MB
    """
    cells = [list(row) for row in rows]
    signs = align.ljust(max(map(len, cells), default=0), "<")
    widths = [0] * len(signs)
    for row in cells:
        for column, cell in enumerate(row):
            if column < len(row) - 1 or signs[column] == ">":
                widths[column] = max(widths[column], len(cell))
    if width is not None:
        widths[0] = min(widths[0], width - len(indent) - sum(2 + other for other in widths[1:]))
        for row in cells:
            if len(row[0]) > widths[0]:
                row[0] = "..." + row[0][3 - widths[0] :]
    lines = ("  ".join(f"{c:{sign}{wide}}" for c, sign, wide in zip(row, signs, widths, strict=False)) for row in cells)
    return [f"{indent}{line}".rstrip() for line in lines]
