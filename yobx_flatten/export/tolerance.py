"""The tolerance of a replay: fixed, or what half precision costs the model on each case."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from ..huggingface.sliding_decoder import SlidingDecoder
from .example.example import Example
from .program.traced import Traced
from .proof.replay import Case, following
from .proof.report import ExportReport, tolerance_of
from .proof.yardstick import Yardstick, in_half

__all__ = ["Allowed", "explained_by"]


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What outputs may differ by, for a program and the files of all runtimes."""

    tolerance: float  # largest absolute difference of an output that is not measured
    measures: bool = False  # whether the cost of the type of the weights is measured

    @staticmethod
    def of(module: torch.nn.Module, asked: float | None) -> Allowed:
        """Return what was asked for; by default what the type of the weights explains."""
        return Allowed(tolerance_of(module), in_half(module)) if asked is None else Allowed(asked)

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
        after = module.next_inputs if isinstance(module, SlidingDecoder) else following()
        is_same = known is not None and known.is_of(module)
        report.yardstick = known if is_same else Yardstick(module, after, example.names, traced.written)


def explained_by(report: ExportReport, case: Case) -> Mapping[str, float] | None:
    """Return by output the largest difference that is explained on a case; ``None`` where nothing is measured."""
    return None if report.yardstick is None else report.yardstick.allowed(case)
