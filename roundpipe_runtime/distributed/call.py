"""One call of ``forward_backward`` on several ranks: what they exchange before and after their runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..batch.flat import FlatMicrobatch
from ..batch.loss import LossContract
from ..device.transfer import HostValue
from ..engine.run import Run
from .losses import LossReport
from .reduction import ReductionPlan

__all__ = ["Call", "Halfway", "Opening", "Verdict"]


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


@dataclasses.dataclass(slots=True)
class Call:
    """One call of ``forward_backward``, as all ranks have agreed on it.

    Attributes:
        parts: Microbatches of each group of this rank.
        firsts: Index of the first microbatch of each group of this rank in the batch.
        contract: Contract of the batch.
        plan: What is summed.
        seed: Seed of random layers.
        first_rank: Rank with the first group that has rows.
        runs: Runs of this rank that have succeeded, with their inputs.
        is_one_pass: Whether each microbatch goes back as soon as it has its loss, so that the contract has all losses.
        total: Loss of the batch, of a call in two passes.
        written: Buffers that the first group of this rank wrote, where the model has them already.
        feeds: Whether the call goes on backward from the inputs; autograd does otherwise.
    """

    parts: list[list[FlatMicrobatch]]
    firsts: list[int]
    contract: LossContract
    plan: ReductionPlan
    seed: int
    first_rank: int
    runs: list[tuple[Run, list[HostValue]]] = dataclasses.field(default_factory=list)
    is_one_pass: bool = True
    total: Any = None
    written: Mapping[tuple[int, int], torch.Tensor] | None = None
    feeds: bool = True
