"""Combine the losses of a batch of which each rank computes a part."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ...batch.loss import BackwardTerm, LossContract, LossValue


class GroupLosses(LossContract):
    """The contract of a batch, as the microbatches of one group see it.

    Seeds follow from the rows of all groups. The scale, which is not known before all ranks have their losses, is left
    to the sum over the groups.
    """

    # first: index of the group's first microbatch in the batch

    def __init__(self, whole: LossContract, first: int, count: int) -> None:
        super().__init__(whole.reduction, whole.rows[first : first + count])
        self._whole, self._first = whole, first

    def add(self, index: int, value: Any, items: Sequence[float] = ()) -> list[BackwardTerm]:
        """Take the loss of one microbatch of the group; see :meth:`LossContract.add`."""
        return self._whole.add(self._first + index, value, items)

    @property
    def kind(self) -> str | None:
        """What the loss function returns; ``None`` before the first loss."""
        return self._whole.kind

    @property
    def weights(self) -> list[float]:
        """The weight of each microbatch of the group."""
        return self._whole.weights[self._first : self._first + len(self.rows)]

    def gradient_scale(self) -> float:
        """Return 1: the sum over the groups is scaled, once."""
        return 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class LossReport:
    """The loss of one microbatch on its way to the other ranks."""

    index: int  # index of the microbatch in the batch
    value: LossValue  # the loss, with its tensors on the host


def report_losses(contract: LossContract) -> list[LossReport]:
    """Return the losses that this rank has computed."""
    values = contract.values()
    return [
        LossReport(index, dataclasses.replace(value, tensors=tuple(tensor.cpu() for tensor in value.tensors)))
        for index, value in sorted(values.items())
    ]


def total_contract(contract: LossContract, reports: Sequence[LossReport]) -> LossContract:
    """Return a contract with the losses of all ranks, which has the same bits on each of them."""
    found = LossContract(contract.reduction, contract.rows)
    for report in sorted(reports, key=lambda one: one.index):
        found.add_value(report.index, report.value)
    return found
