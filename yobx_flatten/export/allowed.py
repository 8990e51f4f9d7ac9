"""What a replay may differ by: one tolerance, or what half precision costs the model itself, measured on each case."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from ..huggingface.sliding_decoder import SlidingDecoder
from .example import Example
from .replay import Case, following
from .report import ExportReport, tolerance_of
from .traced import Traced
from .yardstick import Yardstick, in_half

__all__ = ["Allowed", "explained_by"]


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What outputs may differ by, for a program and the files of all runtimes.

    Attributes:
        tolerance: largest absolute difference of an output that is not measured.
        measures: whether the cost of the type of the weights is measured.
    """

    tolerance: float
    measures: bool = False

    @staticmethod
    def of(module: torch.nn.Module, asked: float | None) -> Allowed:
        """Return what was asked for; by default what the type of the weights explains.

        Args:
            module: the module.
            asked: a tolerance; ``None`` for none.
        """
        return Allowed(tolerance_of(module), in_half(module)) if asked is None else Allowed(asked)

    def measure(self, report: ExportReport, example: Example, traced: Traced, known: Yardstick | None = None) -> None:
        """Let a report allow what the type of the weights costs, or note why that cannot be measured.

        Args:
            report: the report of the program or the file that is to be replayed.
            example: what was traced.
            traced: the program.
            known: a yardstick of the same module, whose measurements are taken; ``None``, the default, for none.
        """
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
    """Return by output the largest difference that is explained on a case; ``None`` where nothing is measured.

    Args:
        report: the report of the replay.
        case: what is replayed.
    """
    return None if report.yardstick is None else report.yardstick.allowed(case)
