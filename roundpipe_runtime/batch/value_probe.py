"""Detect what a loss decides by values, so that a proof can try the other decisions.

The mean over the rows of one class is a mean over all rows, as long as all have this class. A few rows rarely show it,
so comparisons are answered differently for some of them, alike in one piece and in parts::

    rows 0 to 2     labels == 1    found [T, T, T]    answered [T, T, F]
    rows 0 and 1                         [T, T]                [T, T]
    row 2                                [T]                   [F]

Values that Python reads (``if mask.any()``, ``count.item()``) are also watched: of those that were not seen both
ways, other ones are returned, and nothing may come of it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from yobx_flatten.private_names.of_torch import pytree

__all__ = ["Answers", "Changed", "Decision", "Decisions", "ValueProbe"]

# How Python gets numbers out of a tensor; comparisons of whole tensors are among them.
_READS = {"__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "item", "tolist", "numpy",
          "__array__", "equal", "allclose", "is_nonzero"}  # fmt: skip

# A loss that is not finite is not a loss, whatever it does about it.
_OF_NO_NUMBER = {"isnan", "isinf", "isfinite", "isposinf", "isneginf"}

# Numbers next to one that was read, for a loss that compares it with a limit of its own.
_OTHERS = (0, 10**6)

# Decisions that are also answered one by one.
_SINGLE = 6


@dataclasses.dataclass(frozen=True)
class Decision:
    """A comparison of values of a batch, or values that Python read."""

    name: str  # name of the function
    given: Sequence[Any]  # its arguments, flat
    found: Any  # its result: a tensor of truth values, or the value that Python read

    def is_of(self, name: str, given: Sequence[Any]) -> bool:
        """Report whether it is this call, of the same values."""
        return self.name == name and len(self.given) == len(given) and all(map(_is_same, self.given, given))

    @property
    def constants(self) -> list[float]:
        """Numbers that the values were compared with."""
        return [one for one in self.given if isinstance(one, (int, float)) and not isinstance(one, bool)]


# What calls return instead, the first of each call and values.
Answers: TypeAlias = Sequence[Decision]


@dataclasses.dataclass(frozen=True)
class Changed:
    """Answers about rows."""

    whole: Answers  # answers for all rows in one piece
    parts: Sequence[Answers]  # answers for each part
    may_contradict: bool  # whether one of several answers may change what another one is about, in some parts only

    def contradicts(self, whole: Sequence[Decision], parts: Sequence[Sequence[Decision]]) -> bool:
        """Report whether a run with these answers decided otherwise in one piece than in parts: a proof of nothing."""
        return self.may_contradict and _aligned(whole, parts) is None


class ValueProbe(TorchFunctionMode):
    """Notes what is decided by values of a batch, and answers some of it."""

    # begins_with: tensors of which the first one that is used begins the notes. Default: they begin at once.

    def __init__(
        self, sources: Sequence[torch.Tensor], answers: Answers = (), begins_with: Sequence[torch.Tensor] = ()
    ) -> None:
        super().__init__()
        self.decisions: list[Decision] = []
        self._answers = answers
        self._of_batch, self._awaited = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        for tensor in sources:
            self._of_batch[tensor] = True
        for tensor in begins_with:
            self._awaited[tensor] = True
        self._has_begun = not begins_with

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        given = pytree.tree_leaves((args, kwargs or {}))
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        made = [one for one in pytree.tree_leaves(found) if isinstance(one, torch.Tensor)]
        if made or name in _READS:  # and not a shape
            self._has_begun = self._has_begun or any(one in self._awaited for one in tensors)
        if name in _OF_NO_NUMBER or not any(one in self._of_batch for one in tensors):
            return found
        if self._has_begun and (name in _READS or _compares(tensors, found)):
            found = self._decided(name, given, found)
            made = [found] if isinstance(found, torch.Tensor) else []
        changed = tensors[:1] if name.endswith("_") else []  # in place, or `__setitem__`
        for one in (*made, *changed):
            self._of_batch[one] = True
        return found

    def _decided(self, name: str, given: Sequence[Any], found: Any) -> Any:
        kept = [one.detach() if isinstance(one, torch.Tensor) else one for one in given]
        for answer in self._answers:
            if answer.is_of(name, kept):
                found = answer.found
                break
        self.decisions.append(Decision(name, kept, found))
        return found.clone() if isinstance(found, torch.Tensor) else found


def _compares(tensors: Sequence[torch.Tensor], found: Any) -> bool:
    is_truth = isinstance(found, torch.Tensor) and found.dtype == torch.bool
    return is_truth and any(one.dtype != torch.bool for one in tensors)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _is_close(one, other)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return type(one) is type(other) and bool(one == other)


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)  # parts of a batch are rounded otherwise


@dataclasses.dataclass(frozen=True)
class _Question:
    """A decision about rows: what it found in one piece, and in the parts."""

    whole: Decision
    parts: Sequence[Decision | None]
    axis: int | None = None  # of the rows; None for a decision about one row, in one of the parts

    def answers(self, change: Callable[[torch.Tensor, bool], torch.Tensor]) -> tuple[Decision, list[Decision | None]]:
        """The answers in one piece and in the parts; `change` gets truth values, and whether they are of the last."""
        last = len(self.parts) - 1
        found = [
            None if one is None else dataclasses.replace(one, found=change(torch.as_tensor(one.found), number == last))
            for number, one in enumerate(self.parts)
        ]
        made = [one.found for one in found if one is not None]
        whole = made[0] if self.axis is None else torch.cat(made, self.axis)
        return dataclasses.replace(self.whole, found=_as(whole, self.whole.found)), [
            None if one is None or before is None else dataclasses.replace(one, found=_as(one.found, before.found))
            for one, before in zip(found, self.parts, strict=True)
        ]


def _as(answer: torch.Tensor, found: Any) -> Any:
    return answer if isinstance(found, torch.Tensor) else bool(answer)


class Decisions:
    """What a loss decided for some rows in one piece, and for the same rows in parts."""

    def __init__(self, whole: Sequence[Decision], parts: Sequence[Sequence[Decision]]) -> None:
        self._number = len(parts)
        found = _aligned(whole, parts)
        self.is_aligned = found is not None
        questions, self._of_all = found or ([], {})
        self._questions = [one for one in questions if _is_truth(one.whole.found)]
        self._opaque = [one.whole for one in questions if not _is_truth(one.whole.found)]
        self._seen: dict[int, set[bool]] = {}

    def note(self, *runs: Sequence[Decision]) -> None:
        """Note what runs decided that gave the loss as stated: of what was seen both ways, nothing is left to show."""
        for run in runs:
            for place, asked in self._of_all.items():
                one = run[place] if -len(run) <= place < len(run) else None
                if one is not None and one.name == asked.name and _is_truth(one.found):
                    self._seen.setdefault(place, set()).add(bool(torch.as_tensor(one.found).all()))

    def changed(self) -> Iterator[Changed]:
        """Yield answers about rows, in one piece and in the parts."""
        generator = torch.Generator().manual_seed(3)

        def drawn(found: torch.Tensor, _: bool) -> torch.Tensor:
            return torch.rand(found.shape, generator=generator) < 0.5

        changes: list[Callable[[torch.Tensor, bool], torch.Tensor]] = [
            lambda found, is_last: torch.zeros_like(found) if is_last else found,
            lambda found, is_last: torch.ones_like(found) if is_last else found,
            drawn,
            drawn,
        ]
        groups: list[list[_Question]] = []
        for one in self._questions:
            linked = next((group for group in groups if _is_about_the_same(group[0].whole, one.whole)), None)
            if linked is None:
                groups.append([one])
            else:
                linked.append(one)
        of_each = [[group] for group in groups] if 1 < len(groups) <= _SINGLE else []
        for chosen, change in itertools.product([groups, *of_each], changes):
            if chosen:
                found = [answer for group in chosen for answer in _linked(group, change)]
                of_parts = [
                    [part for _, parts in found if (part := parts[number]) is not None]
                    for number in range(self._number)
                ]
                yield Changed([whole for whole, _ in found], of_parts, len(chosen) > 1 and bool(of_each))

    def others(self, *, reads_rows: bool) -> Iterator[Answers]:
        """Yield other answers in one piece to what concerns all rows."""
        for place, one in self._of_all.items():
            if len(self._seen.get(place, ())) < 2:
                yield from ([answer] for answer in _opposites(one))
        for one in self._opaque if reads_rows else ():
            yield from ([answer] for answer in _opposites(one))


def _is_about_the_same(one: Decision, other: Decision) -> bool:
    """Whether two decisions are about the same values, and say the same or the opposite."""
    (first, *_), (second, *_) = ([x for x in each.given if isinstance(x, torch.Tensor)] for each in (one, other))
    if (
        first.numel() != second.numel()
        or first.dtype != second.dtype
        or not _is_close(first.flatten(), second.flatten())
    ):
        return False
    return _relation(one, other) is not None


def _relation(one: Decision, other: Decision) -> bool | None:
    """Whether a decision is the opposite of another one; ``None`` where it is something else."""
    found, before = (torch.as_tensor(each.found).flatten() for each in (other, one))
    if found.shape != before.shape:
        return None
    return False if torch.equal(found, before) else True if torch.equal(found, ~before) else None


def _linked(
    group: Sequence[_Question], change: Callable[[torch.Tensor, bool], torch.Tensor]
) -> list[tuple[Decision, list[Decision | None]]]:
    """The answers to questions about the same values, which do not contradict each other."""
    first, own = group[0], group[0].answers(change)
    found = [own]
    for one in group[1:]:
        is_opposite = bool(_relation(first.whole, one.whole))
        pairs = zip((one.whole, *one.parts), (own[0], *own[1]), strict=True)
        whole, *parts = [
            None
            if asked is None
            else dataclasses.replace(asked, found=_said((answer or own[0]).found, asked.found, is_opposite))
            for asked, answer in pairs
        ]
        assert whole is not None
        found.append((whole, parts))
    return found


def _said(answer: Any, found: Any, is_opposite: bool) -> Any:
    truth = torch.as_tensor(answer) ^ is_opposite
    return truth.reshape(found.shape) if isinstance(found, torch.Tensor) else bool(truth)


def _opposites(one: Decision) -> Iterator[Decision]:
    if isinstance(one.found, bool):
        yield dataclasses.replace(one, found=not one.found)
    elif isinstance(one.found, torch.Tensor):
        yield dataclasses.replace(one, found=~one.found)
    elif isinstance(one.found, (int, float)):
        for other in _OTHERS:
            yield dataclasses.replace(one, found=type(one.found)(other))
    else:  # a list, or an array
        yield dataclasses.replace(one, found=pytree.tree_map(lambda value: value * 0, one.found))


def _is_truth(found: Any) -> bool:
    return isinstance(found, bool) or (isinstance(found, torch.Tensor) and found.dtype == torch.bool)


def _reads_truth(one: Decision) -> bool:
    """Whether Python reads what a comparison, which is answered itself, or a label states."""
    return one.name in _READS and isinstance(one.given[0], torch.Tensor) and one.given[0].dtype == torch.bool


def _is_global(one: Decision) -> bool:
    return not isinstance(one.found, torch.Tensor) or one.found.numel() == 1


def _aligned(
    whole: Sequence[Decision], parts: Sequence[Sequence[Decision]]
) -> tuple[list[_Question], dict[int, Decision]] | None:
    """Decisions about rows, and those about all rows at once by their place; ``None`` where that is not clear."""
    counts = [len(one) for one in parts]
    if all(count == len(whole) for count in counts):
        return _in_line(whole, parts)
    # a loop over rows: what comes in it is of one row
    shared = sum(counts) - len(whole)
    if len(parts) != 2 or not 0 <= shared <= min(counts):
        return None
    for before in range(shared, -1, -1):
        after = shared - before
        inside = [one[before : len(one) - after] for one in parts]
        looped = [*((one, 0) for one in inside[0]), *((one, 1) for one in inside[1])]
        middle = whole[before : len(whole) - after]
        if all(one.is_of(other.name, other.given) for one, (other, _) in zip(middle, looped, strict=True)):
            outer = _in_line(
                [*whole[:before], *whole[len(whole) - after :]],
                [[*one[:before], *one[len(one) - after :]] for one in parts],
            )
            if outer is None:
                return None
            asked = [
                _Question(one, [other if number == place else None for number in range(2)])
                for one, (other, place) in zip(middle, looped, strict=True)
                if not _reads_truth(one)
            ]
            return [*outer[0], *asked], {
                place if place < before else place - shared: one for place, one in outer[1].items()
            }
    return None


def _in_line(
    whole: Sequence[Decision], parts: Sequence[Sequence[Decision]]
) -> tuple[list[_Question], dict[int, Decision]] | None:
    questions, of_all = [], {}
    for place, (one, *others) in enumerate(zip(whole, *parts, strict=True)):
        if any(other.name != one.name for other in others):
            return None
        if _is_global(one) and all(map(_is_global, others)):
            of_all[place] = one
            continue
        axis = _axis(one, others)
        if axis is None:
            return None
        questions.append(_Question(one, others, axis))
    return questions, of_all


def _axis(whole: Decision, parts: Sequence[Decision]) -> int | None:
    """The axis along which the truth values of parts are those of all rows."""
    found = [one.found for one in (whole, *parts)]
    if not all(isinstance(one, torch.Tensor) and one.dim() == found[0].dim() for one in found):
        return None
    for axis in range(found[0].dim()):
        if _is_joined(found[0], found[1:], axis) and all(
            _is_joined(one, others, axis)
            for one, *others in zip(whole.given, *(part.given for part in parts), strict=True)
            if isinstance(one, torch.Tensor) and one.shape == found[0].shape
        ):
            return axis
    return None


def _is_joined(whole: torch.Tensor, parts: Sequence[torch.Tensor], axis: int) -> bool:
    sizes = [list(one.shape) for one in (whole, *parts)]
    total = sum(size.pop(axis) for size in sizes[1:])
    rest = sizes[0][:axis] + sizes[0][axis + 1 :]
    if sizes[0][axis] != total or any(size != rest for size in sizes[1:]):
        return False
    return _is_close(whole, torch.cat(list(parts), axis))
