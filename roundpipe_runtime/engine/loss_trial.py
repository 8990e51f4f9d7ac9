"""Try on a few rows whether the losses of parts add up to the loss of all of them.

::

    as it is                rows 0 to 2 in one piece, rows 0 and 1, and row 2
    other labels            the same, with labels that were exchanged, cleared, or drawn from those that there are
    other decisions         the same, with other answers to comparisons of values, see `value_probe`

The weights of the parts (their rows; 1; the items that losses of torch average over) have to hold in all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch

from yobx_flatten.private_names.of_torch import pytree

from ..batch.averages import count_items
from ..batch.joining import join
from ..batch.loss import LossValue, read_loss
from ..batch.steady_draws import SteadyDraws
from ..batch.value_probe import Answers, Decision, Decisions, ValueProbe

__all__ = ["NotCallableError", "Reduction", "Refusal", "Row", "try_rows"]

Reduction: TypeAlias = Literal["sum", "mean"]

# Outputs and labels of some rows, and their number.
Row: TypeAlias = tuple[Any, Any, int]

_TOLERANCE = {torch.float16: 3e-2, torch.bfloat16: 1e-1}
_USUAL = 1e-4

# What a loss raises for values that it does not take.
_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError, ZeroDivisionError)


class NotCallableError(Exception):
    """The loss cannot be called for a few rows, or returns other numbers each time."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why the losses of parts do not add up."""

    whole: LossValue | None  # loss of all rows; `None` where it is what the loss decides by that is not known
    parts: Sequence[LossValue]  # losses of the parts
    rows: Sequence[int]  # rows of the parts
    by_values: bool  # whether it shows with other values of labels, or other decisions, only


@dataclasses.dataclass(frozen=True)
class _Found:
    value: LossValue
    items: tuple[float, ...]
    decisions: Sequence[Decision]


@dataclasses.dataclass(frozen=True)
class _Run:
    """The losses of all rows and of the parts."""

    whole: _Found
    parts: Sequence[_Found]


def try_rows(
    loss_fn: Callable[[Any, Any], Any], reduction: Reduction, rows: Sequence[Row], cuts: Sequence[int]
) -> tuple[Refusal | None, bool]:
    """Return why losses of parts do not add up, if so, and whether anything was compared."""
    trial = _Trial(loss_fn, cuts)
    try:
        first = trial.run(rows)
        again = trial.find(rows)
    except _REFUSALS as error:
        raise NotCallableError(f"{type(error).__name__}: {error}") from error
    if not _is_near(again.value.tensors, first.whole.value.tensors, _limit(first.whole)):
        raise NotCallableError("it returns other numbers each time")
    ways = _Ways(reduction, trial.counts(rows))
    if not ways.hold(first):
        return ways.refusal(first, by_values=False), True
    labels = _other_labels(rows, first.whole.decisions)
    decisions = Decisions(first.whole.decisions, [one.decisions for one in first.parts])
    if not decisions.is_aligned:
        return Refusal(None, (), trial.counts(rows), by_values=True), True
    decisions.note(first.whole.decisions, *(one.decisions for one in first.parts))
    for changed in labels:
        run = _tried(trial, changed)
        if run is not None and not ways.hold(run):
            return ways.refusal(run, by_values=True), True
    for answers in decisions.changed():
        run = _tried(trial, rows, answers.whole, answers.parts)
        if run is None or answers.contradicts(run.whole.decisions, [one.decisions for one in run.parts]):
            continue
        if not ways.hold(run):
            return ways.refusal(run, by_values=True), True
        decisions.note(run.whole.decisions, *(one.decisions for one in run.parts))
    # who returns a sum and its weight has said what he reads of rows
    for others in decisions.others(reads_rows=first.whole.value.kind != "pair"):
        try:
            found = trial.find(rows, others)
        except _REFUSALS:
            continue  # an error is not a wrong number
        if not _is_same_loss(found, first.whole):
            return Refusal(None, (), trial.counts(rows), by_values=True), True
    return None, ways.compared > 0


def _tried(trial: _Trial, rows: Sequence[Row], whole: Answers = (), parts: Sequence[Answers] = ()) -> _Run | None:
    try:
        return trial.run(rows, whole, parts)
    except _REFUSALS:
        return None


class _Trial:
    """Evaluations of a loss for some rows in one piece and in parts."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any], cuts: Sequence[int]) -> None:
        self._loss_fn, self._cuts = loss_fn, cuts

    def counts(self, rows: Sequence[Row]) -> list[int]:
        """The rows of each part."""
        return [sum(count for *_, count in part) for part in self._parts(rows)]

    def run(self, rows: Sequence[Row], whole: Answers = (), parts: Sequence[Answers] = ()) -> _Run:
        """The losses of all rows and of the parts."""
        given = parts or [()] * len(self._cuts)
        of_parts = [self.find(part, one) for part, one in zip(self._parts(rows), given, strict=True)]
        return _Run(self.find(rows, whole), of_parts)

    def find(self, rows: Sequence[Row], answers: Answers = ()) -> _Found:
        """The loss of some rows in one piece."""
        torch.default_generator.manual_seed(1)  # and no other: devices have theirs
        # clones, which may be written in place
        outputs, labels = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, _joined(rows))
        given = [one for one in pytree.tree_leaves((outputs, labels)) if isinstance(one, torch.Tensor)]
        with torch.no_grad(), SteadyDraws(), count_items() as items, ValueProbe(given, answers) as probe:
            value = read_loss(self._loss_fn(outputs, labels))
        return _Found(value, tuple(items.counts), probe.decisions)

    def _parts(self, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
        start = 0
        for cut in self._cuts:
            yield rows[start : start + cut]
            start += cut


class _Ways:
    """The weights of parts that have held so far."""

    def __init__(self, reduction: Reduction, rows: Sequence[int]) -> None:
        self._reduction, self._rows = reduction, rows
        # a script that divides by the number of microbatches itself has means, by rows or by items
        self._left = ["rows", "ones", "items"] if reduction == "sum" else ["rows"]
        self.compared = 0

    def hold(self, run: _Run) -> bool:
        """Report whether some weights also hold for these losses; nothing follows from those that are no numbers."""
        whole, parts = run.whole.value, [one.value for one in run.parts]
        if any((one.kind, len(one.tensors)) != (whole.kind, len(whole.tensors)) for one in parts):
            return True  # the contract of the losses states that itself
        if not all(bool(one.isfinite()) for one in whole.tensors):
            return True
        if self._reduction == "mean" and self._is_refused_anyway(run):
            return True
        if whole.kind == "pair":
            weights = [one.weight or 0.0 for one in parts]
            # a sum of nothing that is not zero: torch's losses count labels that were answered not to count
            contradicts = self.compared and any(not one.weight and bool(one.tensors[0]) for one in parts)
            if not whole.weight or not sum(weights) or contradicts:
                return True
            self.compared += 1
            return _adds_up(run, [1 / sum(weights) if weight else 0.0 for weight in weights], 1 / whole.weight)
        self.compared += 1
        self._left = [way for way in self._left if (shares := self._shares(way, run)) and _adds_up(run, shares)]
        return bool(self._left)

    def _is_refused_anyway(self, run: _Run) -> bool:
        """Whether losses of torch average over items that the contract of the losses refuses in each call."""
        ratios = {
            tuple(round(count / rows, 9) for count in one.items)
            for one, rows in zip((run.whole, *run.parts), (sum(self._rows), *self._rows), strict=True)
        }
        return len(ratios) > 1

    def _shares(self, way: str, run: _Run) -> list[float] | None:
        if way == "ones":
            return [1.0] * len(self._rows)
        if way == "rows":
            return [count / sum(self._rows) for count in self._rows]
        items = [one.items for one in run.parts]
        if not all(len(set(counts)) == 1 for counts in items) or not sum(counts[0] for counts in items):
            return None
        return [counts[0] / sum(other[0] for other in items) for counts in items]

    def refusal(self, run: _Run, *, by_values: bool) -> Refusal:
        """State what was found."""
        return Refusal(run.whole.value, [one.value for one in run.parts], self._rows, by_values)


def _adds_up(run: _Run, shares: Sequence[float], factor: float = 1.0) -> bool:
    limit = _limit(run.whole)
    terms = [(one, share) for one, share in zip(run.parts, shares, strict=True) if share]
    for number, tensor in enumerate(run.whole.value.tensors):
        found = torch.stack([one.value.tensors[number].double().cpu() * share for one, share in terms]).sum()
        if not _is_near([found], [tensor.double().cpu() * factor], limit):
            return False
    return True


def _is_same_loss(one: _Found, other: _Found) -> bool:
    """Whether two evaluations have the same loss; of a pair, the same sum, as its weight is compared with parts."""
    same_kind = one.value.kind == other.value.kind and len(one.value.tensors) == len(other.value.tensors)
    return same_kind and _is_near(one.value.tensors, other.value.tensors, _limit(other))


def _limit(found: _Found) -> float:
    dtypes = [one.dtype for one in found.value.tensors]
    return max(_TOLERANCE.get(dtype, _USUAL) for dtype in dtypes)


def _is_near(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], limit: float) -> bool:
    return len(found) == len(expected) and all(
        torch.allclose(one.double().cpu(), other.double().cpu(), rtol=limit, atol=limit * 1e-2, equal_nan=True)
        for one, other in zip(found, expected, strict=True)
    )


def _joined(rows: Sequence[Row]) -> tuple[Any, Any]:
    counts = [count for *_, count in rows]
    outputs, labels = (join([row[place] for row in rows], counts, rows=counts) for place in range(2))
    return outputs, labels


# -- other labels ----------------------------------------------------------------------------------------------------


def _other_labels(rows: Sequence[Row], decisions: Sequence[Decision]) -> Iterator[list[Row]]:
    """Yield the same rows with other labels: drawn of those there are and what they are compared with, or cleared."""
    columns = [pytree.tree_flatten(labels)[0] for _, labels, _ in rows]
    cut = [
        number
        for number, column in enumerate(zip(*columns, strict=True))
        if all(_is_of_row(one, row) for one, row in zip(column, rows, strict=True))
        and len({id(one) for one in column}) == len(rows)
    ]
    if not cut:
        return
    constants = sorted({round(number) for one in decisions for number in one.constants if abs(number) < 2**31})
    generator = torch.Generator().manual_seed(5)
    for extra in ([*constants, 0, 1], [0, 1], []):
        made = [list(column) for column in columns]
        for number in cut:
            _draw(made, number, extra, generator)
        yield _with_labels(rows, made)
    for filling in (-100, 0):
        made = [list(column) for column in columns]
        for number in cut:
            made[-1][number] = torch.full_like(made[-1][number], filling if _may_be_ignored(made[-1][number]) else 0)
        yield _with_labels(rows, made)


def _is_of_row(leaf: Any, row: Row) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == row[2]


def _may_be_ignored(labels: torch.Tensor) -> bool:
    return labels.dtype in (torch.int64, torch.int32, torch.int16)


def _draw(columns: list[list[Any]], number: int, extra: Sequence[int], generator: torch.Generator) -> None:
    held = [column[number] for column in columns]
    first = held[0]
    if first.is_floating_point():
        for column in columns:
            one = column[number]
            column[number] = one * torch.rand(one.shape, generator=generator).to(one.dtype)
    elif not first.is_complex():
        pool = torch.unique(torch.cat([*(one.flatten() for one in held), torch.tensor(extra, dtype=first.dtype)]))
        for column in columns:
            one = column[number]
            column[number] = pool[torch.randint(len(pool), one.shape, generator=generator)]


def _with_labels(rows: Sequence[Row], columns: Sequence[Sequence[Any]]) -> list[Row]:
    return [
        (outputs, pytree.tree_unflatten(list(column), pytree.tree_structure(labels)), count)
        for (outputs, labels, count), column in zip(rows, columns, strict=True)
    ]
