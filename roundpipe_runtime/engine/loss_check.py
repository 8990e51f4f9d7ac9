"""Show on a few rows how the losses of microbatches add up, before the first gradient of a call.

The layers have run on some rows of the batch, in one piece and in parts (`rows`), or on a microbatch. The loss
function is called with what they returned, as `batch/loss_proof` asks, in a block that leaves no trace of it::

    loss_reduction="auto"    the weights that hold; without any, the loss is one of the joined outputs
    loss_reduction="mean"    an error, unless the loss is a mean over rows
    loss_reduction="sum"     an error, unless it is a sum, or a mean that the script divides by itself
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch

from yobx_flatten.core.effects import undisturbed
from yobx_flatten.private_names.of_torch import pytree

from ..batch.averages import count_items
from ..batch.flat import FlatBatch, FlatMicrobatch
from ..batch.joining import join
from ..batch.loss import Reduction, read_loss
from ..batch.loss_proof import Column, Evaluation, NotProvenError, Part, Proof, Way, in_32_bits, prove, variants
from ..batch.same_rows import rows_of, shared_by_rows
from ..batch.splitting import split_flat
from ..batch.steady_draws import SteadyDraws
from ..device.generator import generator_alone
from ..errors import JoinError, LossError, RoundPipeWarning, SplitError, warn
from .layer_graph import other_leaves
from .repeats import Repeats, state_of

# Rows that are enough for two parts with different numbers of rows.
_ROWS = 3

_WAYS: dict[str, tuple[Way, ...]] = {
    "auto": ("rows", "items", "sum"),
    "mean": ("rows",),
    "sum": ("sum", "rows", "items"),
}


class JoinedLossError(LossError):
    """The loss cannot be computed from the losses of microbatches, so it is computed once from the joined outputs."""

    # is_lasting: whether this holds for the loss function, and not for this batch alone
    # unclear: kind of a loss that failed for a few rows, of which nothing is known if it also fails for all of them

    def __init__(self, reason: str, *, is_lasting: bool = True, unclear: Hashable = None) -> None:
        self.reason, self.is_lasting, self.unclear = reason, is_lasting, unclear
        super().__init__(
            f"The loss of the batch cannot be computed from the losses of microbatches: {reason} In one process, it "
            "can be computed once from the joined outputs:"
            '\n    RoundPipeRunConfig(loss_reduction="joined")\n'
            "If it is a mean over items other than rows, return the sum and the number of items:\n"
            "    return WeightedLoss(total, number)"
        )


@dataclasses.dataclass(frozen=True)
class Sample:
    """Outputs and labels of a few rows, each with its number: in one piece, and in parts."""

    whole: tuple[Any, Any, int]
    parts: Sequence[tuple[Any, Any, int]]
    others: Sequence[Any] = ()  # leaves of the labels of the batch: other values that occur

    def evaluate(
        self, loss_fn: Callable[[Any, Any], Any], values: Sequence[torch.Tensor], places: Sequence[int]
    ) -> Evaluation:
        """Compute the losses of other values, in the places of leaves with rows."""
        held, spec = pytree.tree_flatten(self.whole[:2])
        number = len(pytree.tree_leaves(self.whole[0]))
        given = dict(zip(places, values, strict=True))
        whole = [given.get(place, leaf) for place, leaf in enumerate(held)]
        leaves: dict[int, torch.Tensor] = {}
        for place, leaf in enumerate(whole[:number]):
            if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                leaves[place] = whole[place] = leaf.detach().requires_grad_()
        starts = [0] * len(whole)
        found = [_called(loss_fn, whole, spec, self.whole[2])]
        axes = self.axes()
        for outputs, labels, rows in self.parts:
            cut = pytree.tree_leaves((outputs, labels))
            for place, axis in enumerate(axes):
                if axis is not None:
                    size = cut[place].shape[axis]
                    cut[place] = whole[place].narrow(axis, starts[place], size)
                    starts[place] += size
            found.append(_called(loss_fn, cut, spec, rows))
        own = [leaves[place] for place in leaves if axes[place] is not None]
        trained = other_leaves([loss for one in found for loss in one.losses if loss.requires_grad], own)
        return (
            found[0],
            found[1:],
            [*own, *(one for one in trained if not any(one is leaf for leaf in leaves.values()))],
        )

    @property
    def is_short(self) -> bool:
        """Whether some outputs have 16 bits."""
        return any(in_32_bits(leaf) is not leaf for leaf in pytree.tree_leaves(self.whole[0]))

    def widened(self) -> Sample:
        """Return the same rows in 32 bits: 16 would hide wrong weights, and take rounding for a difference."""
        whole, parts, others = pytree.tree_map(in_32_bits, (self.whole, list(self.parts), list(self.others)))
        return Sample(whole, parts, others)

    def axes(self) -> list[int | None]:
        """The axis of the rows of each leaf."""
        last = pytree.tree_leaves(self.parts[-1][:2])
        whole = pytree.tree_leaves(self.whole[:2])
        if len(whole) != len(last):
            raise SplitError("The outputs of some rows have another structure.")
        return [rows_of(one, part, self.whole[2]) for one, part in zip(whole, last, strict=True)]

    def columns(self) -> tuple[list[Column], list[int]]:
        """The leaves with rows, and their places."""
        held, number = pytree.tree_leaves(self.whole[:2]), len(pytree.tree_leaves(self.whole[0]))
        columns, places = [], []
        for place, (leaf, axis) in enumerate(zip(held, self.axes(), strict=True)):
            if axis is None or leaf.dim() == 0 or leaf.dtype == torch.bool:
                continue
            is_label = place >= number
            others = self.others[place - number] if is_label and place - number < len(self.others) else None
            others = others if isinstance(others, torch.Tensor) and others.dtype == leaf.dtype else None
            columns.append(Column(leaf.detach(), axis, "label" if is_label else "output", others))
            places.append(place)
        return columns, places


def _called(loss_fn: Callable[[Any, Any], Any], leaves: Sequence[Any], spec: pytree.TreeSpec, rows: int) -> Part:
    """The loss of some rows, of clones, which may be written in place; drawn from the same seed for all."""
    torch.default_generator.manual_seed(1)  # and no other: devices have theirs
    given = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    outputs, labels = pytree.tree_unflatten(given, spec)
    with torch.enable_grad(), SteadyDraws(), count_items() as items:
        found = read_loss(loss_fn(outputs, labels))
    counts = set(items.trained)
    is_mean = found.kind == "tensor" and len(counts) == 1 and not (items.others or items.sums)
    known = counts.pop() if is_mean else None
    return Part(found.tensors, rows, known, found.weight)


def sample_of(found: Sequence[tuple[Any, Any, int]], others: Sequence[Any]) -> Sample:
    """Return some rows of a microbatch, or of several of one row, in one piece and in parts."""
    # found: outputs, labels and rows of microbatches
    if len(found) == 1:
        return _cut(*found[0], others)
    if len(found) < 2:
        raise SplitError("There is one row.")
    return Sample(_joined(found), [_joined(found[:-1]), found[-1]], others)


def _joined(found: Sequence[tuple[Any, Any, int]]) -> tuple[Any, Any, int]:
    counts = [count for *_, count in found]
    outputs, labels = (join([one[place] for one in found], counts, rows=counts) for place in range(2))
    return outputs, labels, sum(counts)


def _cut(outputs: Any, labels: Any, count: int, others: Sequence[Any]) -> Sample:
    batch = FlatBatch.of((outputs,), {}, labels)
    [first, *_] = split_flat(batch, math.ceil(count / _ROWS))
    (own,), _ = pytree.tree_unflatten(first.inputs, first.spec)
    held = pytree.tree_unflatten(first.labels, first.label_spec)
    if (first.rows or 0) < 2:
        raise SplitError("There is one row.")
    parts, shared = [], shared_by_rows(pytree.tree_leaves(labels), others)
    for part in split_flat(FlatBatch.of((own,), {}, held), 2):
        (some,), _ = pytree.tree_unflatten(part.inputs, part.spec)
        given = [one if kept else cut for one, cut, kept in zip(first.labels, part.labels, shared, strict=True)]
        parts.append((some, pytree.tree_unflatten(given, part.label_spec), part.rows or 0))
    return Sample((own, held, first.rows or 0), parts, others)


def loss_code(function: Any) -> Hashable:
    """Return a key of a loss function that stays the same if a script creates it in each step."""
    function = inspect.unwrap(function)
    while isinstance(function, partial):
        function = function.func
    code: Hashable = getattr(getattr(function, "__func__", function), "__code__", None) or id(function)
    return code


class LossChecks:
    """How the losses of one pipeline add up: by loss function, by what was stated, and by the kind of its labels."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Reduction | JoinedLossError] = {}
        self._repeats = Repeats()
        self._last: tuple[Hashable, object] | None = None
        self._reason: str | None = None  # why nothing was shown in this call

    def reduction(
        self,
        loss_fn: Callable[[Any, Any], Any],
        stated: str,
        microbatches: Sequence[FlatMicrobatch],
        samples: Callable[[], Iterator[Sample]],
    ) -> Reduction:
        """Return how the losses of microbatches add up."""
        # samples: function that runs layers on some rows
        if getattr(loss_fn, "has_proven_weights", False):
            return "sum"
        kind = loss_code(loss_fn), stated, tuple(map(_kind, microbatches[0].labels))
        self._last = kind, loss_fn
        known = self._found.get(kind)
        is_due = self._repeats.is_due(kind, state_of(loss_fn)) or known is None
        # a batch that shows less takes nothing back: what was not a weighted sum once is never one
        if is_due and not isinstance(known, JoinedLossError):
            found = self._checked(loss_fn, stated, samples, known, kind)
            if found == "nothing":  # follows, as no label counts in these rows
                raise JoinedLossError("no label counts in its first rows, or it is not finite there.", is_lasting=False)
            self._found[kind] = found
        return _refuse(self._found[kind], stated)

    def forget(self, error: JoinedLossError) -> None:
        """Forget a loss that failed for a few rows, and for all of them: it is shown in the next call."""
        self._found.pop(error.unclear, None)

    def end(self) -> None:
        """Note what the loss function holds at the end of a call, which may have changed it."""
        self._reason = None
        if self._last is not None:
            self._repeats.end(self._last[0], state_of(self._last[1]))
            self._last = None

    def warn(self) -> None:
        """Warn, after a successful call, that its loss could not be checked."""
        reason, self._reason = self._reason, None
        if reason is not None:
            warn(
                f"It could not be checked that the loss is the same for any split of a batch: {reason} If it "
                "compares rows with each other, or selects some of them, write:"
                '\n    RoundPipeRunConfig(loss_reduction="joined")',
                RoundPipeWarning,
            )

    def _checked(
        self,
        loss_fn: Callable[[Any, Any], Any],
        stated: str,
        samples: Callable[[], Iterator[Sample]],
        known: Reduction | None,
        kind: Hashable,
    ) -> Reduction | JoinedLossError | Literal["nothing"]:
        reason = "the layers do not run on some rows of the batch."
        is_shown = False
        try:
            for sample in samples():
                found = self._proof(loss_fn, stated, sample, known)
                if found.shown is not None:
                    return _not_additive(stated, *found.shown, has_other_values=found.has_other_values)
                if found.compared or found.is_pair:
                    return _REDUCTIONS[stated, found.way or "rows"]
                is_shown = True
        except (SplitError, JoinError) as error:
            reason = str(error)
        except NotProvenError as error:
            reason = f"loss_fn cannot be called for a few rows: {error}."
            self._reason = None if is_shown else reason
        if stated == "auto":
            return "nothing" if is_shown else JoinedLossError(reason, unclear=kind)
        return "mean" if stated == "mean" else "sum"

    def _proof(self, loss_fn: Callable[[Any, Any], Any], stated: str, sample: Sample, known: Reduction | None) -> Proof:
        if sample.is_short:  # in the types of the layers only where the loss takes no others
            with contextlib.suppress(NotProvenError):
                return self._proof(loss_fn, stated, sample.widened(), known)
        columns, places = sample.columns()
        ways = [way for way in _WAYS[stated] if known is None or _REDUCTIONS[stated, way] == known]
        # no other thread draws meanwhile
        with generator_alone(), torch.autocast("cpu", enabled=False), undisturbed(loss_fn=loss_fn) as before:

            def called(outputs: Any, labels: Any) -> Any:
                before.restore()  # each call is the next one after those of the training
                return loss_fn(outputs, labels)

            return prove(
                lambda values: sample.evaluate(called, values, places),
                itertools.islice(variants(columns), None if known is None else _AGAIN),
                ways,
                as_stated=stated == "mean",
            )


# Sets of values that are compared when a proof is repeated: those of the batch, and some others.
_AGAIN = 3

_REDUCTIONS: dict[tuple[str, str], Reduction] = {
    ("auto", "rows"): "rows", ("auto", "items"): "items", ("auto", "sum"): "sum", ("mean", "rows"): "mean",
    ("sum", "sum"): "sum", ("sum", "rows"): "sum", ("sum", "items"): "sum",
}  # fmt: skip


def _refuse(found: Reduction | JoinedLossError, stated: str) -> Reduction:
    if isinstance(found, str):
        return found
    raise JoinedLossError(found.reason, unclear=found.unclear) if stated == "auto" else LossError(str(found))


def _not_additive(stated: str, whole: Part, parts: Sequence[Part], *, has_other_values: bool) -> JoinedLossError:
    what = (
        'a mean over rows, as loss_reduction="mean" states'
        if stated == "mean"
        else "a sum or a mean over rows or labels"
    )
    when = ", where labels or outputs have other values" if has_other_values else ""
    returned = " and ".join(f"{part.value} for {part.rows}" for part in parts)
    return JoinedLossError(
        f"loss_fn returns {whole.value} for {whole.rows} rows, and {returned} of them{when}. So it is not {what}: it "
        "would depend on how the batch is split. It may compare rows, or select them by their values."
    )


def _kind(label: Any) -> Hashable:
    return f"{label.dtype}, {label.dim()}" if isinstance(label, torch.Tensor) else type(label).__qualname__
