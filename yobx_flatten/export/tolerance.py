"""The tolerance of a replay: fixed, or what half precision costs the model on each case."""

from __future__ import annotations

import dataclasses

from .example.example import Example
from .model_facts import ModelFacts
from .program.traced import Traced
from .proof.report import ExportReport, tolerance_of
from .proof.yardstick import Yardstick

__all__ = ["Allowed"]


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What outputs may differ by, for a program and the files of all runtimes."""

    tolerance: float  # largest absolute difference of an output that is not measured
    measures: bool = False  # whether the cost of the type of the weights is measured

    @staticmethod
    def of(facts: ModelFacts, asked: float | None) -> Allowed:
        """Return what was asked for; by default what the type of the weights explains."""
        return Allowed(tolerance_of(facts.types), facts.is_in_half) if asked is None else Allowed(asked)

    def measure(self, report: ExportReport, example: Example, traced: Traced, known: Yardstick | None = None) -> None:
        """Let a report allow what the type of the weights costs, or note why that cannot be measured."""
        # known: a yardstick of the same module, whose measurements are taken; `None`, the default, for none
        if not self.measures or report.proof == "none" or example.no_data:
            return
        module = example.module
        reason = Yardstick.why_not(module)
        if reason:
            report.remark(
                f"what the type of the weights costs was not measured, since {reason}: {report.tolerance} is allowed."
            )
            return
        is_same = known is not None and known.is_of(module)
        report.yardstick = known if is_same else Yardstick(module, example.names, traced.written)
