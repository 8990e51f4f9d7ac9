"""Check on a few rows how the losses of microbatches add up, before a pipeline call computes gradients.

For a few rows of the batch, and for two parts of these rows, the layers compute outputs, and `batch/loss_proof` calls
the loss function. If all labels of these rows are ignored, or if no loss of these rows is finite, the check uses all
rows of a microbatch. The check restores the state of the loss function and of random generators.
"""

# loss_reduction="auto"    use matching weights of microbatches; if there are none, compute the loss of joined outputs
# loss_reduction="mean"    raise an error unless the loss is a mean over rows
# loss_reduction="sum"     raise an error unless the loss is a sum, or a mean (the script divides by the microbatches)

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from yobx_flatten.core.effects import undisturbed
from yobx_flatten.core.private_names.of_torch import pytree

from ..batch.entries import FlatMicrobatch
from ..batch.loss import Reduction, read_loss
from ..batch.loss_proof import (
    Column,
    Evaluation,
    LossProof,
    NotProvenError,
    Part,
    Proof,
    Role,
    SteadyDraws,
    Way,
    count_items,
    in_32_bits,
    prove,
    variants,
)
from ..device.worker import generator_alone
from ..errors import JoinError, LossError, RoundPipeWarning, SplitError, warn
from .code_state import Repeats, function_of
from .layer_graph import other_leaves
from .rows import RowTrial

ONE_MICROBATCH = LossProof("items")  # needs no weights, and proves nothing about other batches
_WAYS: dict[str, tuple[Way, ...]] = {
    "auto": ("rows", "items", "sum"),
    "mean": ("rows",),
    "sum": ("sum", "rows", "items"),
}

NONLINEAR = LossProof(
    "joined",
    "the divisor of the loss is known only after the last microbatch, but a layer's gradients are not proportional to "
    "the gradients of its outputs (a hook may clamp them).",
    1,
)


class JoinedLossError(LossError):
    """The loss of a batch cannot be computed from the losses of its microbatches, only from their joined outputs."""

    def __init__(self, proof: LossProof) -> None:
        self.proof = proof
        super().__init__(
            f"The loss of the batch cannot be computed from the losses of microbatches: {proof.reason} In one process, "
            'the loss can be computed once from the joined outputs:\n    RoundPipeRunConfig(loss_reduction="joined")\n'
            "If loss_fn takes a mean over items other than rows, return the sum and the number of items:\n"
            "    return WeightedLoss(total, number)"
        )


# Computes the loss of all rows (0) or of a part (1, 2, ...), from other leaves.
Loss: TypeAlias = Callable[[int, Sequence[Any]], Part]


@dataclasses.dataclass(frozen=True)
class Sample:
    """Inputs of trial calls of the loss function: outputs and labels of a few rows of a batch."""

    leaves: Sequence[Sequence[Any]]  # leaves for all rows, then for each part
    rows: Sequence[int]  # number of all rows, then of each part
    roles: Sequence[Role | None]  # role of each leaf; `None` for a leaf that is not a tensor
    others: Mapping[int, object]  # labels of the whole batch by position, from which other values are taken
    spec: pytree.TreeSpec  # structure of the leaves

    @classmethod
    def of(cls, trial: RowTrial, outputs: Sequence[Any], others: Sequence[Any] = ()) -> Sample:
        # outputs: outputs for all rows, then for each part; others: leaves of the labels of the batch
        given = [trial.whole, *trial.parts]
        labels = [pytree.tree_unflatten([*map(on_host, one.labels)], one.label_spec) for one in given]
        number, (held, spec) = len(pytree.tree_leaves(outputs[0])), pytree.tree_flatten((outputs[0], labels[0]))
        leaves = [held, *(pytree.tree_leaves(one) for one in zip(outputs[1:], labels[1:], strict=True))]
        if len({len(one) for one in leaves}) > 1:
            raise SplitError("The outputs or labels of some rows have a different structure than those of all rows.")
        of_tensors: list[Role] = ["output" if place < number else "label" for place in range(len(held))]
        roles = [role if isinstance(leaf, torch.Tensor) else None for role, leaf in zip(of_tensors, held, strict=True)]
        return cls(leaves, [one.rows or 0 for one in given], roles, dict(enumerate(others, number)), spec)

    def prove(
        self,
        loss: Loss,
        called: object,
        ways: Sequence[Way],
        ignored: Sequence[int] = (-100,),
        *,
        again: bool,
        as_stated: bool = False,
    ) -> Proof:
        """Find weights with which the losses of parts of the rows add up to the loss of all rows."""
        # called: object whose changes by the calls are undone
        # again: whether the weights were checked before, so that only the batch's own values are compared
        columns = {
            place: Column(leaf.detach(), axis, role, self.others.get(place))
            for place, (leaf, axis, role) in enumerate(zip(self.leaves[0], self.axes, self.roles, strict=True))
            if axis is not None and role is not None
        }
        values = itertools.islice(variants([*columns.values()], ignored), 1 if again else None)
        with calls_apart(called) as next_call:

            def apart(number: int, leaves: Sequence[Any]) -> Part:
                next_call(number)
                return loss(number, leaves)

            return prove(partial(self._evaluate, apart, [*columns], again), values, ways, as_stated=as_stated)

    def _evaluate(self, loss: Loss, places: Sequence[int], again: bool, values: Sequence[torch.Tensor]) -> Evaluation:
        # places, values: positions of leaves, and the tensors that replace these leaves
        # again: whether only gradients of outputs are compared: those of a large head take most of the time
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
        if again and own:
            return found[0], found[1:], own
        return found[0], found[1:], [*own, *other_leaves([one for part in found for one in part.losses], trained)]

    def widened(self) -> Sample:
        """Return the outputs and labels in 32-bit dtypes, since 16-bit rounding may hide wrong weights of losses."""
        if all(in_32_bits(leaf) is leaf for leaf in self.leaves[0]):
            return self
        others = {place: in_32_bits(one) for place, one in self.others.items()}
        return dataclasses.replace(self, leaves=[[*map(in_32_bits, one)] for one in self.leaves], others=others)

    @functools.cached_property
    def axes(self) -> list[int | None]:
        """The axis along which each output and label is split into parts; ``None`` for a value that is not split."""
        found: list[int | None] = []
        for whole, *parts in zip(*self.leaves, strict=True):
            axes: list[int] = []
            if all(isinstance(one, torch.Tensor) and one.dim() == getattr(whole, "ndim", -1) for one in parts):
                axes = [axis for axis, size in enumerate(whole.shape) if any(one.shape[axis] != size for one in parts)]
            is_cut = len(axes) == 1 and sum(part.shape[axes[0]] for part in parts) == whole.shape[axes[0]]
            found.append(axes[0] if is_cut else None)
        return found


@contextlib.contextmanager
def calls_apart(called: object) -> Iterator[Callable[[int], None]]:
    """Restore the states of the loss function ``called`` and random generators after trial calls in the with block."""
    # yields: function to run before each call of the loss function, which gets the number of the part of the rows
    # no other thread draws meanwhile; 16-bit rounding by autocast would hide wrong weights; warnings about single rows
    # do not concern the user
    with (
        generator_alone(),
        torch.autocast("cpu", enabled=False),
        undisturbed(called=called) as before,
        warnings.catch_warnings(),
        torch.enable_grad(),
    ):
        warnings.simplefilter("ignore")

        def next_call(number: int) -> None:
            if number < 2:  # later parts see the effects of earlier parts, as in training
                before.restore()
            torch.default_generator.manual_seed(1)  # only the CPU's generator, as the loss runs on the CPU

        yield next_call


def on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def loss_code(function: Any) -> Hashable:
    """Return a key that stays the same when a script defines the same loss function again in each step."""
    found = function_of(inspect.unwrap(function))
    code: Hashable = getattr(found, "__code__", None) or id(found)
    return code


class LossChecks:
    """Checks how the losses of microbatches add up to the loss of the batch, and caches the results."""

    def __init__(self) -> None:
        self.proofs: dict[Hashable, LossProof] = {}
        self.repeats = Repeats()
        self._unclear: str | None = None  # why this call could not be checked

    def find(self, kind: Hashable, code: object, show: Callable[[LossProof | None], LossProof]) -> LossProof:
        """Return how the losses of microbatches add up, from an earlier check of similar calls or a new check."""
        # show: function that returns a new proof, given an earlier proof whose weights must match again
        known, is_due = self.proofs.get(kind), self.repeats.is_due(kind, code)
        # a loss that was not a weighted sum once is never treated as a weighted sum later
        if known is not None and not (is_due and known.is_sum):
            return known
        proof = show(known)
        if proof is not ONE_MICROBATCH and (proof.compared or proof.way != "joined"):
            self.proofs[kind] = proof
        return proof

    def reduction(
        self,
        loss_fn: Callable[[Any, Any], Any],
        stated: str,
        microbatches: Sequence[FlatMicrobatch],
        samples: Callable[[], Iterator[Sample]],
        is_nonlinear: bool = False,
    ) -> Reduction:
        if getattr(loss_fn, "has_proven_weights", False):
            return "sum"
        kind = loss_code(loss_fn), stated, tuple(map(kind_of_value, microbatches[0].labels))
        proof = self.find(kind, loss_fn, partial(self._show, loss_fn, stated, samples))
        if is_nonlinear and proof.is_late:
            proof = NONLINEAR
        if proof.way == "joined" or proof.way == "whole":
            error = JoinedLossError(proof)
            raise error if stated == "auto" else LossError(str(error))
        return proof.way if stated == "auto" else "mean" if stated == "mean" else "sum"

    def forget(self, failed: LossProof) -> None:
        """Delete a check result that turned out wrong when a loss was computed, so that the next call checks again."""
        self.proofs = {kind: proof for kind, proof in self.proofs.items() if proof is not failed}

    def end(self) -> None:
        self._unclear = None
        self.repeats.end()

    def warn(self) -> None:
        if self._unclear is not None:
            warn(
                f"RoundPipe could not check whether the loss depends on how a batch is split: {self._unclear} If the "
                "loss compares rows with each other, or selects rows, write:\n    "
                'RoundPipeRunConfig(loss_reduction="joined")',
                RoundPipeWarning,
            )

    def _show(
        self,
        loss_fn: Callable[[Any, Any], Any],
        stated: str,
        samples: Callable[[], Iterator[Sample]],
        known: LossProof | None,
    ) -> LossProof:
        proof = LossProof("joined", "the layers do not run on some rows of the batch.", 1)
        try:
            for sample in samples():
                found = _proof(loss_fn, stated, sample, known)
                if found.shown is not None:
                    is_mean, what = stated == "mean", "a sum or a mean over rows or labels"
                    what = 'a mean over rows, as loss_reduction="mean" states' if is_mean else what
                    reason = f"loss_fn returns {found.shown}. So the loss is not {what}: it would depend on how the "
                    reason += "batch is split. loss_fn may compare rows, select them, or read what its calls change."
                    return LossProof("joined", reason, found.compared)
                if found.compared or found.is_pair:
                    way, is_late = found.way or "rows", found.is_pair or found.way == "items"
                    return LossProof(way, compared=max(found.compared, 1), is_late=is_late)
                proof = LossProof("joined", "the first rows have no labels that count, or their loss is not finite.")
        except (SplitError, JoinError, NotProvenError) as error:
            reason = str(error)
            if isinstance(error, NotProvenError):
                reason += "."
                self._unclear = reason if proof.compared else None
            if proof.compared:
                proof = LossProof("joined", reason, 1)
        return proof if stated == "auto" else LossProof("rows")


def _proof(loss_fn: Callable[[Any, Any], Any], stated: str, sample: Sample, known: LossProof | None) -> Proof:
    if (wide := sample.widened()) is not sample:  # the original dtypes are only for a loss that does not run in 32 bits
        with contextlib.suppress(NotProvenError):
            return _proof(loss_fn, stated, wide, known)
    ways = [way for way in _WAYS[stated] if known is None or stated != "auto" or way == known.way]

    def loss(number: int, leaves: Sequence[Any]) -> Part:
        given = pytree.tree_map_only(torch.Tensor, torch.clone, leaves)  # the loss may write to them in place
        outputs, labels = pytree.tree_unflatten(given, sample.spec)
        with SteadyDraws(), count_items() as items:
            found = read_loss(loss_fn(outputs, labels))
        counts = set(items.trained)
        is_mean = found.kind == "tensor" and len(counts) == 1 and not (items.others or items.sums)
        return Part(found.tensors, sample.rows[number], counts.pop() if is_mean else None, found.weight)

    return sample.prove(loss, loss_fn, ways, again=known is not None, as_stated=stated == "mean")


def kind_of_value(value: Any) -> Hashable:
    """Return properties of an argument, such as its dtype, by which a loss function may choose a branch."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim()
    return (type(value), value) if isinstance(value, bool | str) else type(value).__qualname__
