"""One call of ``forward_backward``: what it runs, and what its runs have found so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from ..batch.flat import FlatMicrobatch
from ..batch.loss import LossContract, Reduction
from ..device.transfer import HostValue
from .parameters.on_device import Gradients
from .run import Run


class Cutting(NamedTuple):
    """A batch in microbatches."""

    parts: list[list[FlatMicrobatch]]  # microbatches of each group of this process
    reduction: Reduction | None = "sum"  # how their losses add up; `None` where its rows do not show it


@dataclasses.dataclass(slots=True)
class Call:
    """One call of ``forward_backward``, whose rows are cut into groups, and each group into microbatches."""

    parts: list[list[FlatMicrobatch]]  # microbatches of each group of this process
    firsts: list[int]  # index of the first microbatch of each group of this process in the batch
    contract: LossContract  # contract of the losses of the batch
    seed: int = 0  # seed of random layers; 0 for that of the caller's generator
    # runs of groups that have succeeded, with their inputs
    runs: list[tuple[Run, list[HostValue]]] = dataclasses.field(default_factory=list)
    # function that is given gradients as they land, by number of the group and layer; `None` where they stay in the run
    land: Callable[[int, int, Gradients], None] | None = None

    def losses(self, turn: int) -> LossContract:
        """Return the contract of the losses of a group."""
        return self.contract

    def add(self, run: Run, inputs: list[HostValue]) -> None:
        """Take the run of a group that has succeeded."""
        run.collected.buffers.check()
        self.runs.append((run, inputs))
