"""Prove how the losses of microbatches add up to that of the batch, before the first of them is used.

What a model's own loss averages over is not guessed. When a call of a new kind comes, the code after the last layer
runs on a few of its rows, in one piece and in two uneven parts. Weights for the parts are tried in turn::

    items    the number of labels, tokens or rows that torch's loss functions were seen to average over
    rows     the number of rows
    sum      1, so that losses are added

Those are used that give the loss and every gradient of all rows, also where labels of a row are ignored in part or
whole or are others, and where comparisons of values come out otherwise (see `value_probe`). Where none does, where
parts draw other random numbers, or where values of several rows decide, the loss is computed once for all rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

import torch
from torch import nn

from ..batch.value_probe import Changed, Decision, Decisions
from .cutting.cut_state import CutState
from .loss.call_options import CallOptions, gives_share
from .loss.moe_aux_loss import has_auxiliary_loss
from .loss.weights import WeightBy, label_names, loss_of
from .loss_tail import Found, NoDropout, SomeRows, Tail, are_close, left_as_found, wide_rows, widened

__all__ = ["LossProof", "SomeRows", "Way", "gives_loss", "prove"]

Way: TypeAlias = WeightBy | Literal["joined", "whole"]

_WAYS: tuple[WeightBy, ...] = ("items", "rows", "sum")

# Labels that losses ignore: torch's default, and places after the end of every text, for models that look for places.
_IGNORED = (-100, 10**6)

# What a model raises for labels that its loss does not ignore.
_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)


@dataclasses.dataclass(frozen=True)
class LossProof:
    """How the loss of a kind of call is computed.

    Attributes:
        way: ``"items"``, ``"rows"`` or ``"sum"``: in microbatches, with these weights. ``"joined"``: once, on what the
            layers return for all rows. ``"whole"``: in one microbatch.
        reason: Reason for ``"joined"`` and ``"whole"``; empty otherwise.
        variants: Number of sets of labels that were compared; 0 where another batch may show more.
        row_nbytes: Bytes of what the layers return for one row, which a joined loss holds for the whole batch.
    """

    way: Way
    reason: str = ""
    variants: int = 0
    row_nbytes: int = 0

    def __str__(self) -> str:
        if self.way in ("joined", "whole"):
            how = "once for the whole batch" if self.way == "joined" else "in one microbatch"
            return f"computed {how}: {self.reason}"
        weights = {"items": "weighted by the items they count", "rows": "weighted by rows", "sum": "added"}[self.way]
        return f"losses of microbatches are {weights}, proven with {self.variants} sets of labels and masks"


def gives_loss(piece: nn.Module, state: CutState, options: CallOptions) -> bool:
    """Report whether the code after the last layer returns a loss.

    Args:
        piece: last piece of the cut model.
        state: what the layers returned for some rows.
        options: options of the call.
    """
    with left_as_found(piece), torch.no_grad():
        output, _, _ = piece(dataclasses.replace(state, options=dataclasses.replace(options, weight_by="items")))
    return loss_of(output) is not None


def prove(
    model: nn.Module,
    piece: nn.Module,
    whole: SomeRows,
    parts: Sequence[SomeRows],
    options: CallOptions,
    split: Callable[[CutState], Sequence[CutState]] | None = None,
) -> LossProof:
    """Find the weights with which the losses of parts add up to that of all rows.

    Args:
        model: model.
        piece: last piece of the cut model, or the only one.
        whole: some rows.
        parts: the same rows in consecutive parts, of which the last one has the last row.
        options: options of the call.
        split: function that cuts a state of all rows into those of the parts. Default: there are no states.

    Returns:
        The way to compute losses of this kind.
    """
    tail = Tail(model, piece, options, has_auxiliary_loss(model, whole.kwargs), widened(piece))
    whole, parts = wide_rows(whole), [wide_rows(part) for part in parts]
    with left_as_found(piece), NoDropout():
        first = tail.of_all(whole, seed=1)
        if first is None:
            return LossProof("items")  # nothing to weigh
        if not are_close(tail.of_all(whole, seed=2), first):
            return LossProof("whole", "the model draws random numbers after its layers")
        ways = _Ways(tail, whole, parts, split)
        for change in _label_changes(model, whole, first.decisions):
            if not ways.hold_with(change):
                reason = "it is not a mean or sum over rows, nor over labels that torch's loss functions count"
                return ways.otherwise(reason)
        if not ways.compared:
            return ways.otherwise("no labels count in its first rows, or it is not finite there")
        if first.decisions and not ways.hold_for_other_values():
            return ways.otherwise("it decides by values of several rows, such as which of them it averages over")
    return LossProof(ways.left[0], variants=ways.compared)


class _Ways:
    """The weights of the parts that have held so far."""

    def __init__(
        self,
        tail: Tail,
        whole: SomeRows,
        parts: Sequence[SomeRows],
        split: Callable[[CutState], Sequence[CutState]] | None,
    ) -> None:
        self._tail, self._whole, self._parts, self._split = tail, whole, parts, split
        self._is_share = gives_share(whole.kwargs)
        self._shown: list[tuple[Found, Found]] = []  # of all rows and of the parts, those that held
        self.left, self.compared = list(_WAYS), 0

    def otherwise(self, reason: str) -> LossProof:
        """The proof that no weights are known."""
        return LossProof("joined" if self._split else "whole", reason, self.compared)

    def hold_with(self, change: Callable[[SomeRows], SomeRows]) -> bool:
        """Report whether some weights hold where the last row is changed as well."""
        try:
            expected = self._tail.of_all(change(self._whole), seed=1)
        except _REFUSALS:
            if change is _unchanged:
                raise
            return True
        return self._hold(expected, [*self._parts[:-1], change(self._parts[-1])])

    def hold_for_other_values(self) -> bool:
        """Report whether they also hold where comparisons of values come out otherwise."""
        usual = self._tail.of_all(self._whole, seed=1)
        found = self._tail.of_parts(self._whole, self._parts, self._split, self.left[0], self._is_share)
        if usual is None or found is None:
            return False
        decisions = Decisions(usual.decisions, found.of_parts)
        if not decisions.is_aligned:
            return False
        decisions.note(usual.decisions, *found.of_parts)
        for answers in decisions.changed():
            self._shown.clear()
            try:
                expected = self._tail.of_all(self._whole, seed=1, answers=answers.whole)
                is_held = self._hold(expected, self._parts, answers)
            except _REFUSALS:
                continue  # an error is no wrong number
            if not is_held:
                return False
            for one, of_parts in self._shown:
                decisions.note(one.decisions, *of_parts.of_parts)
        for others in decisions.others(reads_rows=True):
            try:
                other = self._tail.of_all(self._whole, seed=1, answers=others)
            except _REFUSALS:
                continue
            if not are_close(other, usual):
                return False
        return True

    def _hold(self, expected: Found | None, parts: Sequence[SomeRows], answers: Changed | None = None) -> bool:
        if expected is None or expected.count == 0 or not expected.loss.isfinite():
            return True
        left, tail, given = [], self._tail, () if answers is None else answers.parts
        for way in self.left:
            found = tail.of_parts(self._whole, parts, self._split, way, self._is_share, given)
            if found is not None and answers is not None and answers.contradicts(expected.decisions, found.of_parts):
                return True
            if found is not None and are_close(found, expected):
                left.append(way)
                self._shown.append((expected, found))
        self.left, self.compared = left, self.compared + 1
        return bool(left)


def _unchanged(rows: SomeRows) -> SomeRows:
    return rows


def _label_changes(
    model: nn.Module, whole: SomeRows, decisions: Sequence[Decision]
) -> Iterator[Callable[[SomeRows], SomeRows]]:
    """Yield functions that change what counts in the last row, so that parts have other numbers of items, or none.

    Labels are ignored, all of them or all but one; or others, of those there are and what they are compared with. Of
    masks, which are what holds nothing but zeros and ones, one place is left: no loss is meant for rows without any.
    """
    yield _unchanged
    own = getattr(getattr(model, "config", None), "semantic_loss_ignore_index", None)
    ignored = (*_IGNORED, *([own] if isinstance(own, int) else []))
    labels = label_names(model)
    for name, value in sorted(whole.kwargs.items()):
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != whole.count:
            continue
        last = value[-1]
        if name in labels and value.dtype.is_floating_point:
            yield functools.partial(_with_last, name=name, last=last * torch.rand(last.shape, generator=_seeded()))
        elif name in labels and value.dtype != torch.bool:
            yield functools.partial(_with_last, name=name, last=_others(value, decisions))
            for filling in ignored:
                yield functools.partial(_with_last, name=name, last=torch.full_like(last, filling))
                if last.numel() > 1:
                    yield functools.partial(_with_last, name=name, last=_but_for_one(last, filling, last.flatten()[-1]))
        elif value.dim() > 1 and bool(((value == 0) | (value == 1)).all()):
            yield functools.partial(
                _with_last, name=name, last=_but_for_one(last, 0, torch.ones_like(last.flatten()[-1]))
            )


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _others(value: torch.Tensor, decisions: Sequence[Decision]) -> torch.Tensor:
    """Other labels for the last row: some that occur, or with which values are compared, and that do not make it up."""
    constants = {round(number) for one in decisions for number in one.constants if 0 <= number <= int(value.max())}
    pool: torch.Tensor = torch.unique(torch.cat([value.flatten(), torch.tensor([0, *constants], dtype=value.dtype)]))
    return pool[torch.randint(len(pool), value[-1].shape, generator=_seeded())].to(value.dtype)


def _but_for_one(row: torch.Tensor, filling: int, kept: torch.Tensor) -> torch.Tensor:
    found = torch.full_like(row, filling).flatten()
    found[-1] = kept
    return found.reshape(row.shape)


def _with_last(rows: SomeRows, *, name: str, last: torch.Tensor) -> SomeRows:
    """Rows of which the last one has another value of an argument."""
    value = torch.cat([rows.kwargs[name][:-1], last[None]])
    return dataclasses.replace(rows, kwargs={**rows.kwargs, name: value})
