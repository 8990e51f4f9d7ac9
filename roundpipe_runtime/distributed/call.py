"""One call of ``forward_backward`` on several ranks: what they exchange before and after their runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..batch.loss import LossContract
from ..device.transfer import HostValue
from ..engine.call import Call
from ..engine.run import Run
from ..errors import DistributedError
from .losses import GroupLosses, LossReport
from .reduction import ReductionPlan

__all__ = ["Halfway", "Opening", "RankCall", "Verdict"]


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """What a rank states before a call.

    Attributes:
        rows: Rows of each microbatch, for each group of the rank.
        seed: Seed of random layers.
        stated: What all ranks must agree on.
        failure: Error of this rank; ``None`` if it can begin.
    """

    rows: list[list[int | None]]
    seed: int
    stated: Mapping[str, object]
    failure: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What a rank states after its runs.

    Attributes:
        begun: Number of exchanges of gradients that it has begun.
        failure: Error of this rank; ``None`` if it has none of its own.
        losses: Losses of its microbatches.
        had: Parameters that got a gradient.
        buffers: Buffers that its first group wrote, by layer and number.
        feeds: Whether gradients go on from its inputs.
        total: Loss of the batch, of a call in two passes.
        has_drawn: Whether a layer has drawn from torch's generators.
    """

    begun: int
    failure: str | None
    losses: Sequence[LossReport] = ()
    had: frozenset[tuple[int, int]] = frozenset()
    buffers: Mapping[tuple[int, int], torch.Tensor] = dataclasses.field(default_factory=dict)
    feeds: bool = False
    total: Any = None
    has_drawn: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Halfway:
    """What a rank states between forward and backward, where the loss is one of the whole batch.

    Attributes:
        of_groups: What the loss needs to know of each group of the rank.
        failure: Error of this rank; ``None`` if it can go on.
    """

    of_groups: Sequence[Any]
    failure: str | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class RankCall(Call):
    """One call of ``forward_backward``, as all ranks have agreed on it.

    Attributes:
        plan: What is summed.
        first_rank: Rank with the first group that has rows.
        is_one_pass: Whether each microbatch goes back as soon as it has its loss, so that the contract has all losses.
        total: Loss of the batch, of a call in two passes.
        written: Buffers that the first group of this rank wrote, where the model has them already.
        feeds: Whether the call goes on backward from the inputs; autograd does otherwise.
    """

    plan: ReductionPlan
    first_rank: int
    is_one_pass: bool = True
    total: Any = None
    written: Mapping[tuple[int, int], torch.Tensor] | None = None
    feeds: bool = True

    def losses(self, turn: int) -> LossContract:
        """Return the contract of the losses of a group."""
        return GroupLosses(self.contract, self.firsts[turn], len(self.parts[turn]))

    def add(self, run: Run, inputs: list[HostValue]) -> None:
        """Take the run of a group that has succeeded.

        Raises:
            DistributedError: the loss function has gradients of its own.
        """
        if len(run.spec.contents) in run.collected.gradients:
            raise DistributedError(
                "The loss function trains parameters of its own, which no layer holds, so they are not summed over the "
                "ranks. Make them part of the model: a last layer that returns what the loss needs."
            )
        Call.add(self, run, inputs)  # a class with slots is made anew, so that super() has another one
