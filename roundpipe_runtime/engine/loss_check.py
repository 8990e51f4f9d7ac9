"""Check on a few rows how the losses of microbatches add up, before the first gradient of a call.

The layers have run on some rows of the batch, in one piece and in parts (`rows`), or on a microbatch. The loss
function is called with what they returned, as `batch/loss_proof` asks, in a block that leaves no trace of it::

    loss_reduction="auto"    the weights that hold; without any, the loss is one of the joined outputs
    loss_reduction="mean"    an error, unless the loss is a mean over rows
    loss_reduction="sum"     an error, unless it is a sum, or a mean that the script divides by itself
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch

from yobx_flatten.core.effects import undisturbed
from yobx_flatten.private_names.of_torch import pytree

from ..batch.averages import count_items
from ..batch.flat import FlatBatch, FlatMicrobatch
from ..batch.joining import join
from ..batch.loss import Reduction, read_loss
from ..batch.loss_proof import Column, Evaluation, NotProvenError, Part, Proof, Role, Way, in_32_bits, prove, variants
from ..batch.splitting import split_flat
from ..batch.steady_draws import SteadyDraws
from ..device.generator import generator_alone
from ..errors import JoinError, LossError, RoundPipeWarning, SplitError, warn
from .layer_graph import other_leaves
from .repeats import Repeats
from .rows import with_shared

# Rows that are enough for two parts of unlike sizes, and values that are compared when a proof is repeated.
_ROWS, _AGAIN = 3, 3

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


# Computes the loss of all rows (0) or of a part (1, 2, ...), of other leaves.
Loss: TypeAlias = Callable[[int, Sequence[Any]], Part]


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a loss reads of a few rows, in one piece and in parts, with each tensor in one place."""

    leaves: Sequence[Sequence[Any]]  # those of all rows, then those of each part
    rows: Sequence[int]  # how many rows these are
    roles: Sequence[Role | None]  # what each leaf is; `None` for one that has no other values
    others: Mapping[int, object]  # labels of the batch by place: other values that occur
    spec: pytree.TreeSpec  # structure of the leaves

    @classmethod
    def of(
        cls, whole: tuple[Any, Any, int], parts: Sequence[tuple[Any, Any, int]], others: Sequence[Any] = ()
    ) -> Sample:
        """Return what a function of outputs and labels reads."""
        # whole, parts: outputs, labels and rows. others: leaves of the labels of the batch
        number, (held, spec) = len(pytree.tree_leaves(whole[0])), pytree.tree_flatten(whole[:2])
        leaves = [held, *(pytree.tree_leaves(one[:2]) for one in parts)]
        if len({len(one) for one in leaves}) > 1:
            raise SplitError("The outputs of some rows have a different structure.")
        of_tensors: list[Role] = ["output" if place < number else "label" for place in range(len(held))]
        has_values = [isinstance(leaf, torch.Tensor) and leaf.dtype != torch.bool for leaf in held]
        roles = [role if there else None for role, there in zip(of_tensors, has_values, strict=True)]
        return cls(leaves, [whole[2], *(one[2] for one in parts)], roles, dict(enumerate(others, number)), spec)

    def prove(
        self, loss: Loss, ways: Sequence[Way], ignored: Sequence[int] = (-100,), *, again: bool, as_stated: bool = False
    ) -> Proof:
        """Find the first weights with which the losses of parts give that of all rows, for all values."""
        # again: whether the weights were checked before, so that few values are compared
        columns = {
            place: Column(leaf.detach(), axis, role, self.others.get(place))
            for place, (leaf, axis, role) in enumerate(zip(self.leaves[0], self.axes, self.roles, strict=True))
            if axis is not None and role is not None
        }
        values = itertools.islice(variants([*columns.values()], ignored), _AGAIN if again else None)
        evaluate = partial(self._evaluate, loss, [*columns])
        return prove(evaluate, values, ways, as_stated=as_stated)

    def _evaluate(self, loss: Loss, places: Sequence[int], values: Sequence[torch.Tensor]) -> Evaluation:
        """The losses of other values in some places, and the tensors in which gradients end."""
        whole = list(self.leaves[0])
        for place, value in zip(places, values, strict=True):
            whole[place] = value
        for place, role in enumerate(self.roles):
            if role == "output" and (whole[place].is_floating_point() or whole[place].is_complex()):
                whole[place] = whole[place].detach().requires_grad_()
        found, starts = [loss(0, whole)], [0] * len(whole)
        for number, part in enumerate(self.leaves[1:], 1):
            cut = list(part)
            for place, axis in enumerate(self.axes):
                if axis is not None:
                    size = part[place].shape[axis]
                    cut[place] = whole[place].narrow(axis, starts[place], size)
                    starts[place] += size
            found.append(loss(number, cut))
        trained = [leaf for leaf in whole if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        own = [whole[place] for place, axis in enumerate(self.axes) if axis is not None and whole[place].requires_grad]
        return found[0], found[1:], [*own, *other_leaves([one for part in found for one in part.losses], trained)]

    def widened(self) -> Sample:
        """Return the same rows in 32 bits: 16 would hide wrong weights, and take rounding for a difference."""
        if all(in_32_bits(leaf) is leaf for leaf in self.leaves[0]):
            return self
        others = {place: in_32_bits(one) for place, one in self.others.items()}
        return dataclasses.replace(self, leaves=[[*map(in_32_bits, one)] for one in self.leaves], others=others)

    @functools.cached_property
    def axes(self) -> list[int | None]:
        """The axis of each leaf along which it is cut, whose sizes add up; ``None`` without one."""
        return [_cut_axis(*column) for column in zip(*self.leaves, strict=True)]


def _cut_axis(whole: Any, *parts: Any) -> int | None:
    if any(not isinstance(one, torch.Tensor) or one.dim() != getattr(whole, "ndim", -1) for one in parts):
        return None
    axes = [axis for axis, size in enumerate(whole.shape) if any(part.shape[axis] != size for part in parts)]
    return axes[0] if len(axes) == 1 and sum(part.shape[axes[0]] for part in parts) == whole.shape[axes[0]] else None


@contextlib.contextmanager
def calls_apart(called: object) -> Iterator[Callable[[int], None]]:
    """Undo the effects of check calls on an object and on generators; the function in the block begins one call."""
    # no other thread draws meanwhile; autocast would hide wrong weights; warnings about single rows are not the user's
    with (
        generator_alone(),
        torch.autocast("cpu", enabled=False),
        undisturbed(called=called) as before,
        warnings.catch_warnings(),
        torch.enable_grad(),
    ):
        warnings.simplefilter("ignore")

        def next_call(number: int) -> None:
            if number < 2:  # later parts find what the parts before them have left, as in the training
                before.restore()
            torch.default_generator.manual_seed(1)  # and no other: devices have theirs

        yield next_call


def sample_of(found: Sequence[tuple[Any, Any, int]], others: Sequence[Any]) -> Sample:
    """Return some rows of a microbatch, or of several of one row, in one piece and in parts."""
    # found: outputs, labels and rows of microbatches
    if len(found) == 1:
        return _cut(*found[0], others)
    if len(found) < 2:
        raise SplitError("There is one row.")
    return Sample.of(_joined(found), [_joined(found[:-1]), found[-1]], others)


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
    parts = []
    for part in split_flat(FlatBatch.of((own,), {}, held), 2):
        (some,), _ = pytree.tree_unflatten(part.inputs, part.spec)
        given = with_shared(part.labels, first.labels, others)
        parts.append((some, pytree.tree_unflatten(given, part.label_spec), part.rows or 0))
    return Sample.of((own, held, first.rows or 0), parts, others)


def loss_code(function: Any) -> Hashable:
    """Return a key of a loss function that stays the same if a script creates it in each step."""
    function = inspect.unwrap(function)
    while isinstance(function, partial):
        function = function.func
    code: Hashable = getattr(getattr(function, "__func__", function), "__code__", None) or id(function)
    return code


class LossChecks:
    """How the losses of one pipeline add up, by loss function, stated reduction, and kind of labels."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Reduction | JoinedLossError] = {}
        self._repeats = Repeats()
        self._reason: str | None = None  # why nothing was shown in this call

    def reduction(
        self,
        loss_fn: Callable[[Any, Any], Any],
        stated: str,
        microbatches: Sequence[FlatMicrobatch],
        samples: Callable[[], Iterator[Sample]],
    ) -> Reduction:
        """Return how the losses of microbatches add up."""
        if getattr(loss_fn, "has_proven_weights", False):
            return "sum"
        kind = loss_code(loss_fn), stated, tuple(map(_kind, microbatches[0].labels))
        known = self._found.get(kind)
        is_due = self._repeats.is_due(kind, loss_fn) or known is None
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
        """Record the state of the loss function at the end of a call, which may have changed it."""
        self._reason = None
        self._repeats.end()

    def warn(self) -> None:
        """Warn, after a successful call, that its loss could not be checked."""
        if self._reason is not None:
            warn(
                f"It could not be checked that the loss is the same for any split of a batch: {self._reason} If it "
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
                    return _reduction(stated, found.way or "rows")
                is_shown = True
        except (SplitError, JoinError) as error:
            reason = str(error)
        except NotProvenError as error:
            reason = f"loss_fn cannot be called for a few rows: {error}."
            self._reason = None if is_shown else reason
        if stated == "auto":
            return "nothing" if is_shown else JoinedLossError(reason, unclear=kind)
        return _reduction(stated, "rows")

    def _proof(self, loss_fn: Callable[[Any, Any], Any], stated: str, sample: Sample, known: Reduction | None) -> Proof:
        if (wide := sample.widened()) is not sample:  # in the types of the layers only where the loss takes no others
            with contextlib.suppress(NotProvenError):
                return self._proof(loss_fn, stated, wide, known)
        ways = [way for way in _WAYS[stated] if known is None or _reduction(stated, way) == known]
        with calls_apart(loss_fn) as next_call:

            def loss(number: int, leaves: Sequence[Any]) -> Part:
                next_call(number)
                given = pytree.tree_map_only(torch.Tensor, torch.clone, leaves)  # which it may write in place
                outputs, labels = pytree.tree_unflatten(given, sample.spec)
                with SteadyDraws(), count_items() as items:
                    found = read_loss(loss_fn(outputs, labels))
                counts = set(items.trained)
                is_mean = found.kind == "tensor" and len(counts) == 1 and not (items.others or items.sums)
                return Part(found.tensors, sample.rows[number], counts.pop() if is_mean else None, found.weight)

            return sample.prove(loss, ways, again=known is not None, as_stated=stated == "mean")


def _reduction(stated: str, way: Way) -> Reduction:
    return way if stated == "auto" else "mean" if stated == "mean" else "sum"


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
        "would depend on how the batch is split. It may compare rows, select them, or read what its own calls change."
    )


def _kind(label: Any) -> Hashable:
    return f"{label.dtype}, {label.dim()}" if isinstance(label, torch.Tensor) else type(label).__qualname__
