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

import contextlib
import dataclasses
import functools
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import Kwargs

from ..batch.value_probe import Answers, Decision, Decisions, ValueProbe
from .cutting.cut_state import CutState
from .cutting.digest import digest, distance, typical
from .loss.call_options import CALL_OPTIONS, CallOptions, gives_share
from .loss.moe_aux_loss import has_auxiliary_loss, without_auxiliary_loss
from .loss.weights import WeightBy, label_names, loss_of, shares_of

__all__ = ["LossProof", "SomeRows", "Way", "gives_loss", "prove"]

Way: TypeAlias = WeightBy | Literal["joined", "whole"]

_WAYS: tuple[WeightBy, ...] = ("items", "rows", "sum")

# Labels that losses ignore: torch's default, and places after the end of every text, for models that look for places.
_IGNORED = (-100, 10**6)

# Parts are summed in another order than all rows, in 32 bits or more, as weights of 16 bits are widened for the proof.
# Wrong weights are off by far more, as labels are spread unevenly.
_TOLERANCE = 3e-5

# What a model raises for labels that its loss does not ignore.
_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)


@dataclasses.dataclass(frozen=True)
class SomeRows:
    """The input of the code after the last layer, for some rows of a batch.

    Attributes:
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model, without the options of the call.
        count: Number of rows.
        state: What the layers returned; ``None`` for a model in one piece.
    """

    args: tuple[Any, ...]
    kwargs: Kwargs
    count: int
    state: CutState | None = None


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
    with _left_as_found(piece), torch.no_grad():
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
    tail = _Tail(model, piece, options, has_auxiliary_loss(model, whole.kwargs), _widened(piece))
    whole, parts = _wide_rows(whole), [_wide_rows(part) for part in parts]
    with _left_as_found(piece), _NoDropout():
        first = tail.of_all(whole, seed=1)
        if first is None:
            return LossProof("items")  # nothing to weigh
        if not _are_close(tail.of_all(whole, seed=2), first):
            return LossProof("whole", "the model draws random numbers after its layers")
        ways = _Ways(tail, whole, parts, split)
        for change in _label_changes(model, whole, first.decisions):
            if not ways.hold_with(change):
                reason = "it is not a mean or sum over rows, nor over labels that torch's loss functions count"
                return ways.otherwise(reason)
        if not ways.compared:
            return ways.otherwise("no labels count in its first rows, or it is not finite there")
        if not ways.hold_for_other_values():
            return ways.otherwise("it decides by values of several rows, such as which of them it averages over")
    return LossProof(ways.left[0], variants=ways.compared)


class _Ways:
    """The weights of the parts that have held so far."""

    def __init__(
        self,
        tail: _Tail,
        whole: SomeRows,
        parts: Sequence[SomeRows],
        split: Callable[[CutState], Sequence[CutState]] | None,
    ) -> None:
        self._tail, self._whole, self._parts, self._split = tail, whole, parts, split
        self._is_share = gives_share(whole.kwargs)
        self._usual: tuple[_Found, _Found] | None = None  # of the rows as they are
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
        if self._usual is None:
            return False
        expected, found = self._usual
        decisions = Decisions(expected.decisions, found.of_parts)
        if not decisions.is_aligned:
            return False
        decisions.note(expected.decisions, *found.of_parts)
        for whole, parts in decisions.changed():
            try:
                is_held = self._hold(self._tail.of_all(self._whole, seed=1, answers=whole), self._parts, parts)
            except _REFUSALS:
                continue  # an error is no wrong number
            if not is_held:
                return False
        for answers in decisions.others(reads_rows=True):
            try:
                other = self._tail.of_all(self._whole, seed=1, answers=answers)
            except _REFUSALS:
                continue
            if not _are_close(other, self._usual[0]):
                return False
        return True

    def _hold(self, expected: _Found | None, parts: Sequence[SomeRows], answers: Sequence[Answers] = ()) -> bool:
        if expected is None or expected.count == 0 or not expected.loss.isfinite():
            return True
        left, tail = [], self._tail
        for way in self.left:
            found = tail.of_parts(self._whole, parts, self._split, way, self._is_share, answers)
            if found is not None and _are_close(found, expected):
                left.append(way)
                self._usual = self._usual or (expected, found)
        self.left, self.compared = left, self.compared + 1
        return bool(left)


@dataclasses.dataclass(frozen=True)
class _Found:
    """A loss, the number of items that it was seen to average over, and its gradients."""

    loss: torch.Tensor
    count: float
    gradients: Sequence[torch.Tensor | None]
    decisions: Sequence[Decision] = ()
    of_parts: Sequence[Sequence[Decision]] = ()


@dataclasses.dataclass(frozen=True)
class _Tail:
    """The code after the last layer."""

    model: nn.Module
    piece: nn.Module
    options: CallOptions
    has_auxiliary: bool
    parameters: Mapping[str, torch.Tensor]

    def of_all(self, rows: SomeRows, *, seed: int, answers: Answers = ()) -> _Found | None:
        """The loss of all rows; ``None`` without one."""
        state, leaves = _with_leaves(rows.state)
        with torch.enable_grad():
            loss, count, decisions = self._loss(dataclasses.replace(rows, state=state), "items", seed, answers)
        if loss is None or not loss.requires_grad:
            return None
        return dataclasses.replace(self._found(loss, count, leaves), decisions=decisions)

    def of_parts(
        self,
        whole: SomeRows,
        parts: Sequence[SomeRows],
        split: Callable[[CutState], Sequence[CutState]] | None,
        way: WeightBy,
        is_share: bool,
        answers: Sequence[Answers] = (),
    ) -> _Found | None:
        """The weighted losses of the parts; ``None`` where they have no such weights."""
        state, leaves = _with_leaves(whole.state)
        with torch.enable_grad():
            states = [None] * len(parts) if state is None or split is None else split(state)
            found = [
                self._loss(dataclasses.replace(part, state=one), way, 1, answered)
                for part, one, answered in zip(parts, states, answers or [()] * len(parts), strict=True)
            ]
            losses = [loss for loss, *_ in found if loss is not None]
            counts = [count for _, count, _ in found]
            is_share = is_share or way == "sum"
            if len(losses) < len(parts) or not all(math.isfinite(n) and (n >= 0 or is_share) for n in counts):
                return None
            shares = shares_of(counts)
            loss = torch.stack([a * b for a, b in zip(losses, shares, strict=True)]).sum()
            made = self._found(loss, sum(counts), leaves) if loss.requires_grad else None
            return made and dataclasses.replace(made, of_parts=[decisions for *_, decisions in found])

    def _loss(
        self, rows: SomeRows, way: WeightBy, seed: int, answers: Answers
    ) -> tuple[torch.Tensor | None, float, Sequence[Decision]]:
        options = dataclasses.replace(self.options, weight_by=way)
        torch.default_generator.manual_seed(seed)  # and no other: devices have theirs
        if rows.state is None:
            args, kwargs = rows.args, {**rows.kwargs, CALL_OPTIONS: options}
        else:
            call = rows.args, rows.kwargs
            args, kwargs = (dataclasses.replace(rows.state, call=call, options=options, seed=seed),), {}
        # what runs before the code looks at outputs of the last layer, or at labels, runs before the layers
        values = {} if rows.state is None else rows.state.values
        given, last = list(values.values()), max((key.call for key in values), default=0)
        labels = [rows.kwargs.get(name) for name in label_names(self.model)] if rows.state is None else []
        begins = [one for key, one in values.items() if key.call == last]
        begins = begins or [one for one in labels if isinstance(one, torch.Tensor)]
        sources = [one for one in pytree.tree_leaves((rows.args, rows.kwargs)) if isinstance(one, torch.Tensor)]
        with ValueProbe([*given, *sources], answers, begins) as probe:
            output, count, _ = functional_call(self.piece, dict(self.parameters), args, kwargs)
        loss = loss_of(output)
        if loss is None:
            return None, count, probe.decisions
        loss = without_auxiliary_loss(self.model, output) if self.has_auxiliary else loss
        return loss, count, probe.decisions

    def _found(self, loss: torch.Tensor, count: float, leaves: Sequence[torch.Tensor]) -> _Found:
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        return _Found(loss.detach(), count, torch.autograd.grad(loss, [*leaves, *trained], allow_unused=True))


def _with_leaves(state: CutState | None) -> tuple[CutState | None, list[torch.Tensor]]:
    """The state with tensors of its own that require gradients, and these tensors."""
    if state is None:
        return None, []
    values = {
        key: _wide(value.detach()).requires_grad_() if value.is_floating_point() else value
        for key, value in state.values.items()
    }
    return dataclasses.replace(state, values=values), [value for value in values.values() if value.requires_grad]


def _widened(piece: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a piece, those of 16 bits as copies of 32: in 16 bits, rounding would hide wrong weights."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in piece.named_parameters():
        wide = _wide(parameter.detach())
        found[name] = parameter if wide.dtype == parameter.dtype else wide.requires_grad_(parameter.requires_grad)
    return found


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _wide_rows(rows: SomeRows) -> SomeRows:
    args, kwargs = pytree.tree_map_only(torch.Tensor, _wide, (rows.args, rows.kwargs))
    return dataclasses.replace(rows, args=args, kwargs=kwargs)


def _are_close(found: _Found | None, expected: _Found) -> bool:
    if found is None:
        return False
    difference = (found.loss.double() - expected.loss.double()).abs()
    if not difference <= _TOLERANCE * expected.loss.double().abs().clamp(min=1e-6):  # NaN is not
        return False
    digests = [
        tuple(None if one is None else digest(one) for one in pair)
        for pair in zip(found.gradients, expected.gradients, strict=True)
    ]
    least = 0.1 * max((typical(right) for _, right in digests if right is not None), default=0.0)
    return all(distance(left, right, least) <= _TOLERANCE for left, right in digests)


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


class _NoDropout(TorchFunctionMode):
    """Leaves out dropout, which would differ between all rows and parts of them."""

    _NAMES = (functional.dropout, functional.alpha_dropout, functional.feature_alpha_dropout, functional.dropout1d,
              functional.dropout2d, functional.dropout3d)  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._NAMES:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


@contextlib.contextmanager
def _left_as_found(piece: nn.Module) -> Iterator[None]:
    """Restore random states and buffers at the end of the block; warnings about single rows are not the user's."""
    buffers = [(buffer, buffer.clone(), buffer._version) for buffer in piece.buffers()]
    state, numpy = random.getstate(), sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    try:
        # without autocast, as rounding would hide wrong weights
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(drawn)
        with torch.no_grad():
            for buffer, before, version in buffers:
                if buffer._version != version:
                    buffer.copy_(before)
