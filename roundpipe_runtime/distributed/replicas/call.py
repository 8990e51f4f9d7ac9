"""One call of ``forward_backward`` on several ranks: what they exchange before and after their runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...batch.loss import LossContract, Reduction
from ...device.transfer import HostValue
from ...engine.call import Call
from ...engine.run import Run
from ...errors import DistributedError
from .losses import GroupLosses, LossReport
from .reduction import ReductionPlan


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """What a rank states before a call."""

    rows: list[list[int | None]]  # rows of each microbatch, for each group of the rank
    seed: int  # seed of random layers
    stated: Mapping[str, object]  # what all ranks must agree on
    failure: str | None = None  # error of this rank; `None` if it can begin
    reduction: Reduction | None = None  # how losses add up; `None` where the rows of this rank do not show it


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What a rank states after its runs."""

    begun: int  # number of exchanges of gradients that it has begun
    failure: str | None  # error of this rank; `None` if it has none of its own
    losses: Sequence[LossReport] = ()  # losses of its microbatches
    had: frozenset[tuple[int, int]] = frozenset()  # parameters that got a gradient
    # buffers that its first group wrote, by layer and number
    buffers: Mapping[tuple[int, int], torch.Tensor] = dataclasses.field(default_factory=dict)
    feeds: bool = False  # whether gradients go on from its inputs
    total: Any = None  # loss of the batch, of a call in two passes
    has_drawn: bool = False  # whether a layer has drawn from torch's generators


@dataclasses.dataclass(frozen=True, slots=True)
class Halfway:
    """What a rank states between forward and backward, where the loss is one of the whole batch."""

    of_groups: Sequence[Any]  # what the loss needs to know of each group of the rank
    failure: str | None = None  # error of this rank; `None` if it can go on


@dataclasses.dataclass(slots=True, kw_only=True)
class RankCall(Call):
    """One call of ``forward_backward``, as all ranks have agreed on it."""

    plan: ReductionPlan  # what is summed
    first_rank: int  # rank with the first group that has rows
    # whether each microbatch goes back as soon as it has its loss, so that the contract has all losses
    is_one_pass: bool = True
    total: Any = None  # loss of the batch, of a call in two passes
    # buffers that the first group of this rank wrote, where the model has them already
    written: Mapping[tuple[int, int], torch.Tensor] | None = None
    feeds: bool = True  # whether the call goes on backward from the inputs; autograd does otherwise

    def losses(self, turn: int) -> LossContract:
        """Return the contract of the losses of a group."""
        return GroupLosses(self.contract, self.firsts[turn], len(self.parts[turn]))

    def add(self, run: Run, inputs: list[HostValue]) -> None:
        """Take the run of a group that has succeeded."""
        if len(run.spec.contents) in run.collected.gradients:
            raise DistributedError(
                "The loss function trains parameters of its own, which no layer holds, so they are not summed over the "
                "ranks. Make them part of the model: a last layer that returns what the loss needs."
            )
        Call.add(self, run, inputs)  # a class with slots is made anew, so that super() has another one
