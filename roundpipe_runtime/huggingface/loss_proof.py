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
from typing import Literal, TypeAlias, TypeGuard

import torch
from torch import nn

from ..batch.steady_draws import NoDropout
from ..batch.value_probe import Answers, Decision, Decisions
from .cutting.cut_state import CutState
from .loss.call_options import CallOptions, gives_share
from .loss.moe_aux_loss import has_auxiliary_loss
from .loss.weights import WeightBy, label_names, loss_of
from .loss_tail import Found, SomeRows, Tail, are_close, left_as_found, wide_rows, widened

__all__ = ["LossProof", "SomeRows", "Way", "gives_loss", "prove"]

Way: TypeAlias = WeightBy | Literal["joined", "whole"]

_WAYS: tuple[WeightBy, ...] = ("items", "rows", "sum")

# Labels that losses ignore: torch's default, and places after the end of every text, for models that look for places.
_IGNORED = (-100, 10**6)

# What a model raises for labels that its loss does not ignore.
_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)


@dataclasses.dataclass(frozen=True)
class LossProof:
    """How the loss of a kind of call is computed."""

    # `"items"`, `"rows"` or `"sum"`: in microbatches, with these weights. `"joined"`: once, on what the layers return
    # for all rows. `"whole"`: in one microbatch.
    way: Way
    reason: str = ""  # reason for `"joined"` and `"whole"`; empty otherwise
    variants: int = 0  # number of sets of labels that were compared; 0 where another batch may show more
    row_nbytes: int = 0  # bytes of what the layers return for one row, which a joined loss holds for the whole batch

    def __str__(self) -> str:
        if self.way in ("joined", "whole"):
            how = "once for the whole batch" if self.way == "joined" else "in one microbatch"
            return f"computed {how}: {self.reason}"
        weights = {"items": "weighted by the items they count", "rows": "weighted by rows", "sum": "added"}[self.way]
        return f"losses of microbatches are {weights}, proven with {self.variants} sets of labels and masks"


def gives_loss(piece: nn.Module, state: CutState, options: CallOptions) -> bool:
    """Report whether the code after the last layer returns a loss."""
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
    """Find the weights with which the losses of parts add up to that of all rows."""
    # piece: last piece of the cut model, or the only one
    # parts: the same rows in consecutive parts, of which the last one has the last row
    # split: function that cuts a state of all rows into those of the parts. Default: there are no states.
    tail = Tail(model, piece, options, has_auxiliary_loss(model, whole.kwargs), widened(piece))
    whole, parts = wide_rows(whole), [wide_rows(part) for part in parts]
    with left_as_found(piece), NoDropout():
        first = tail.of_all(whole, seed=1)
        if first is None:
            return LossProof("items")  # nothing to weigh
        if first.draws and not are_close(tail.of_all(whole, seed=2), first):
            return LossProof("whole", "the model draws random numbers after its layers")
        ways = _Ways(tail, whole, parts, split)
        changes = list(_label_changes(model, whole, first.decisions))
        found: WeightBy | None = next((way for way in _WAYS if ways.hold(way, changes)), None)
        if not ways.compared:
            return ways.otherwise("no labels count in its first rows, or it is not finite there")
        if found is not None and ways.has_refused and not ways.hold(found, list(_other_labels(model, whole, first))):
            found = None
        if found is None:
            reason = "it is not a mean or sum over rows, nor over labels that torch's loss functions count"
            return ways.otherwise(reason)
        if first.decisions and not ways.hold_for_other_values(found, first):
            return ways.otherwise("it decides by values of several rows, such as which of them it averages over")
    return LossProof(found, variants=ways.compared)


Change: TypeAlias = Callable[[SomeRows], SomeRows]


class _Ways:
    """Compares the weighted losses of the parts with those of all rows."""

    def __init__(
        self,
        tail: Tail,
        whole: SomeRows,
        parts: Sequence[SomeRows],
        split: Callable[[CutState], Sequence[CutState]] | None,
    ) -> None:
        self._tail, self._whole, self._parts, self._split = tail, whole, parts, split
        self._is_share = gives_share(whole.kwargs)
        self._expected: dict[Change, Found | None] = {}
        self.compared = 0

    def otherwise(self, reason: str) -> LossProof:
        """The proof that no weights are known."""
        return LossProof("joined" if self._split else "whole", reason, self.compared)

    def hold(self, way: WeightBy, changes: Sequence[Change]) -> bool:
        """Report whether weights hold for the rows as they are, and where the last row is changed."""
        compared, is_held = 0, True
        for change in changes:
            expected = self._expected_with(change)
            if _is_comparable(expected):
                compared += 1
                is_held = are_close(self._of_parts(way, [*self._parts[:-1], change(self._parts[-1])]), expected)
            if not is_held:
                break
        self.compared = max(self.compared, compared)
        return is_held and self.compared > 0

    @property
    def has_refused(self) -> bool:
        """Whether the model raised an error for some labels, so that fewer were compared."""
        return any(one is None for one in self._expected.values())

    def _expected_with(self, change: Change) -> Found | None:
        if change not in self._expected:
            try:
                self._expected[change] = self._tail.of_all(change(self._whole), seed=1)
            except _REFUSALS:
                if change is _unchanged:
                    raise
                self._expected[change] = None
        return self._expected[change]

    def _of_parts(self, way: WeightBy, parts: Sequence[SomeRows], answers: Sequence[Answers] = ()) -> Found | None:
        return self._tail.of_parts(self._whole, parts, self._split, way, self._is_share, answers)

    def hold_for_other_values(self, way: WeightBy, usual: Found) -> bool:
        """Report whether weights that held also do where comparisons of values come out otherwise."""
        found = self._of_parts(way, self._parts)
        if found is None:
            return False
        decisions = Decisions(usual.decisions, found.of_parts)
        if not decisions.is_aligned:
            return False
        decisions.note(usual.decisions, *found.of_parts)
        for answers in decisions.changed():
            try:
                expected = self._tail.of_all(self._whole, seed=1, answers=answers.whole)
                if not _is_comparable(expected):
                    continue
                found = self._of_parts(way, self._parts, answers.parts)
            except _REFUSALS:
                continue  # an error is not a wrong number
            if found is not None and answers.contradicts(expected.decisions, found.of_parts):
                continue
            self.compared += 1
            if found is None or not are_close(found, expected):
                return False
            decisions.note(expected.decisions, *found.of_parts)
        for others in decisions.others(reads_rows=True):
            try:
                other = self._tail.of_all(self._whole, seed=1, answers=others)
            except _REFUSALS:
                continue
            if not are_close(other, usual):
                return False
        return True


def _is_comparable(expected: Found | None) -> TypeGuard[Found]:
    """Whether a loss is a number that depends on something."""
    return expected is not None and expected.count != 0 and bool(expected.loss.isfinite())


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
            others = _others(value, decisions)
            if last.numel() > 1:  # of many labels, all or all but one are ignored, and that one is another
                for filling in ignored[:1] + ignored[len(_IGNORED) :]:
                    yield functools.partial(_with_last, name=name, last=torch.full_like(last, filling))
                    kept = _but_for_one(last, filling, others.flatten()[-1])
                    yield functools.partial(_with_last, name=name, last=kept)
            else:
                yield functools.partial(_with_last, name=name, last=others)
                for filling in ignored:
                    yield functools.partial(_with_last, name=name, last=torch.full_like(last, filling))
        elif value.dim() > 1 and bool(((value == 0) | (value == 1)).all()):
            yield functools.partial(
                _with_last, name=name, last=_but_for_one(last, 0, torch.ones_like(last.flatten()[-1]))
            )


def _other_labels(model: nn.Module, whole: SomeRows, first: Found) -> Iterator[Change]:
    """Yield functions that put others in place of the many labels of the last row, for a model that ignores none."""
    for name in sorted(label_names(model)):
        value = whole.kwargs.get(name)
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[0] != whole.count:
            continue
        if value.dtype != torch.bool and not value.dtype.is_floating_point:
            yield functools.partial(_with_last, name=name, last=_others(value, first.decisions))


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _others(value: torch.Tensor, decisions: Sequence[Decision]) -> torch.Tensor:
    """Other labels for the last row: some that occur, or with which values are compared, and that do not make it up."""
    constants = {round(number) for one in decisions for number in one.constants if 0 <= number <= int(value.max())}
    pool: torch.Tensor = torch.unique(torch.cat([value.flatten(), torch.tensor([0, *constants], dtype=value.dtype)]))
    pool = pool[pool >= 0]
    return pool[torch.randint(len(pool), value[-1].shape, generator=_seeded())].to(value.dtype)


def _but_for_one(row: torch.Tensor, filling: int, kept: torch.Tensor) -> torch.Tensor:
    found = torch.full_like(row, filling).flatten()
    found[-1] = kept
    return found.reshape(row.shape)


def _with_last(rows: SomeRows, *, name: str, last: torch.Tensor) -> SomeRows:
    """Rows of which the last one has another value of an argument."""
    value = torch.cat([rows.kwargs[name][:-1], last[None]])
    return dataclasses.replace(rows, kwargs={**rows.kwargs, name: value})
