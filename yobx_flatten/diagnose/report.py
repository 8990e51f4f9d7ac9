"""Report a comparison: the largest difference, the tolerance, and a table."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping


class Report(abc.ABC):
    """Base of all reports on a comparison. ``print(report)`` shows the report as a table.

    Attributes:
        tolerance: largest absolute difference allowed.
    """

    tolerance: float

    @abc.abstractmethod
    def differences(self) -> Iterable[float]:
        """Return the difference of every comparison; infinite for a call that stopped or cannot be compared."""

    @abc.abstractmethod
    def nan_shares(self) -> Iterable[Mapping[str, float]]:
        """Return, for every test case, the share of NaN in each output: see :func:`~.compare.shares_of_nan`."""

    @abc.abstractmethod
    def __str__(self) -> str:
        """Return the report as a table."""

    @property
    def max_difference(self) -> float:
        """The largest difference of all comparisons; infinite if a call stopped or cannot be compared."""
        return max(self.differences(), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether every difference is within the tolerance, and every output has a finite number in some test case."""
        return self.max_difference <= self.tolerance and not self.without_number()

    def without_number(self) -> list[str]:
        """Return the outputs without a finite element in any test case, for which a comparison shows nothing."""
        least: dict[str, float] = {}
        for shares in self.nan_shares():
            least |= {name: min(share, least.get(name, 1.0)) for name, share in shares.items()}
        return [name for name, share in least.items() if share == 1.0]

    def nan_notes(self) -> list[str]:
        """Return a note on outputs without a finite number, and a note on outputs that contain some NaN."""
        notes, nothing = [], self.without_number()
        if nothing:
            notes.append(
                f"the model itself returns only NaN or infinite values in {', '.join(nothing)}, so nothing was "
                "compared. Look for NaN in the model's weights and inputs."
            )
        most: dict[str, float] = {}
        for shares in self.nan_shares():
            most |= {name: max(share, most.get(name, 0.0)) for name, share in shares.items() if name not in nothing}
        parts = [f"{share:.1%} of {name}" for name, share in most.items() if share]
        if parts:
            notes.append(f"values that are NaN in the model itself were not compared: up to {', '.join(parts)}.")
        return notes
