"""One call of ``forward_backward`` on several ranks, and the exchanges before and after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...batch.loss import BackwardTerm, LossContract, LossValue, Reduction
from ...device.transfer import HostValue
from ...engine.one_group import Call
from ...engine.run import Run
from ...errors import DistributedError
from .reduction import ReductionPlan


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """The message of a rank to all ranks before a call of ``forward_backward``."""

    rows: list[list[int | None]]  # rows of each microbatch, for each group of the rank
    seed: int  # seed of random layers
    stated: Mapping[str, object]  # what all ranks must agree on
    failure: str | None = None  # error of this rank before the call
    reduction: Reduction | None = None  # how losses add up; `None` if this rank has too few rows to find out


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The message of a rank to all ranks after its part of a call: its losses, or its error."""

    begun: int  # number of gradient exchanges that this rank has begun
    failure: str | None  # error of this rank
    losses: Sequence[LossReport] = ()  # losses of its microbatches
    had: frozenset[tuple[int, int]] = frozenset()  # parameters that got a gradient
    # buffers that its first group wrote, by layer and number
    buffers: Mapping[tuple[int, int], torch.Tensor] = dataclasses.field(default_factory=dict)
    feeds: bool = False  # whether the inputs of the call require gradients
    total: Any = None  # loss of the batch, in a call in two passes
    has_drawn: bool = False  # whether a layer has drawn from torch's generators


@dataclasses.dataclass(frozen=True, slots=True)
class Halfway:
    """The message of a rank to all ranks between forward and backward, if one loss is computed for the whole batch."""

    of_groups: Sequence[Any]  # inputs of the loss from each group of the rank
    failure: str | None = None  # error of this rank


@dataclasses.dataclass(slots=True, kw_only=True)
class RankCall(Call):
    """One call of ``forward_backward`` on several ranks, on which all ranks have agreed."""

    plan: ReductionPlan
    first_rank: int  # rank with the first group that has rows
    # whether the backward of each microbatch follows its loss at once, so that the contract has all losses
    is_one_pass: bool = True
    total: Any = None  # loss of the batch, of a call in two passes
    # buffers written by the first group of this rank, if the model has them already
    written: Mapping[tuple[int, int], torch.Tensor] | None = None
    feeds: bool = True  # whether the call continues backward from the inputs; autograd does otherwise

    def losses(self, turn: int) -> LossContract:
        """Return the object that collects the losses of one group of rows."""
        return GroupLosses(self.contract, self.firsts[turn], len(self.parts[turn]))

    def add(self, run: Run, inputs: list[HostValue]) -> None:
        """Add the run of a group of rows, after the run has succeeded."""
        if len(run.spec.contents) in run.collected.gradients:
            raise DistributedError(
                "The loss function has trainable parameters that belong to no layer, so their gradients are not "
                "summed over the ranks. Move the parameters to a last layer that returns the inputs of the loss."
            )
        Call.add(self, run, inputs)  # a class with slots is created anew, so `super()` refers to another class


# Combine the losses of a batch of which each rank computes a part.


class GroupLosses(LossContract):
    """Collects the losses of one group of rows for the :class:`LossContract` of the whole batch.

    The first gradients of a backward depend on the rows of all groups. The summed gradients are scaled after the groups
    are added, because the scale is known only when all ranks have their losses.
    """

    def __init__(self, whole: LossContract, first: int, count: int) -> None:
        super().__init__(whole.reduction, whole.rows[first : first + count])
        self._whole, self._first = whole, first

    def add(self, index: int, value: Any, items: Sequence[float] = ()) -> list[BackwardTerm]:
        """Add the loss of one microbatch of the group; see :meth:`LossContract.add`."""
        return self._whole.add(self._first + index, value, items)

    @property
    def kind(self) -> str | None:
        """The kind of value that the loss function returns; ``None`` before the first loss."""
        return self._whole.kind

    @property
    def weights(self) -> list[float]:
        """The weight of each microbatch of the group in averages over the batch."""
        return self._whole.weights[self._first : self._first + len(self.rows)]

    def gradient_scale(self) -> float:
        """Return 1, since gradients are scaled only once, after they are summed over all groups."""
        return 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class LossReport:
    """The loss of one microbatch, in a form that is sent to the other ranks."""

    index: int  # index of the microbatch in the batch
    value: LossValue  # the loss, with its tensors on the host


def report_losses(contract: LossContract) -> list[LossReport]:
    """Return the losses that this rank has computed, in a form that is sent to the other ranks."""
    values = contract.values()
    return [
        LossReport(index, dataclasses.replace(value, tensors=tuple(tensor.cpu() for tensor in value.tensors)))
        for index, value in sorted(values.items())
    ]


def total_contract(contract: LossContract, reports: Sequence[LossReport]) -> LossContract:
    """Return a :class:`LossContract` with the losses of all ranks; results are bitwise identical on every rank."""
    found = LossContract(contract.reduction, contract.rows)
    for report in sorted(reports, key=lambda one: one.index):
        found.add_value(report.index, report.value)
    return found
