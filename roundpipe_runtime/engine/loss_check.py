"""Check that a loss function is what its reduction states, on the first rows that it is given.

::

    rows 0 to 2 in one piece      loss_fn -> 0.93
    rows 0 and 1, and row 2       loss_fn -> 0.90, 0.99    mean: (2 * 0.90 + 1 * 0.99) / 3 = 0.93, as stated

A loss that compares rows with each other passes no such check, and would be another one for each split of a batch. The
function is called a few times more for it, once in a training, without gradients.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from yobx_flatten.private_names.of_torch import pytree

from ..batch.averages import count_items
from ..batch.flat import FlatBatch
from ..batch.joining import join
from ..batch.loss import LossValue, read_loss
from ..batch.splitting import split_flat
from ..device.generator import generator_alone
from ..errors import JoinError, LossError, RoundPipeError, SplitError
from .generators import held_generators, process_generators

__all__ = ["LossCheck", "LossChecks"]

Reduction: TypeAlias = Literal["sum", "mean"]

# Rows that are enough for two parts with different numbers of rows.
_ROWS = 3

_TOLERANCE = {torch.float16: 3e-2, torch.bfloat16: 1e-1}


class LossChecks:
    """Which loss functions were checked; each once, by its code and the reduction."""

    def __init__(self) -> None:
        self._done: set[Hashable] = set()

    def of(self, loss_fn: Callable[[Any, Any], Any], reduction: Reduction) -> LossCheck | None:
        """Return the check of a loss function; ``None`` if it was checked, or carries weights that were proven.

        Args:
            loss_fn: loss function.
            reduction: reduction of the losses of microbatches.
        """
        if getattr(loss_fn, "has_proven_weights", False):
            return None
        key = _code(loss_fn), reduction
        return None if key in self._done else LossCheck(loss_fn, reduction, functools.partial(self._done.add, key))


def _code(function: Any) -> Hashable:
    """What stays the same where a script makes its loss function anew in each step."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = function.func
    code: Hashable = getattr(getattr(function, "__func__", function), "__code__", None) or id(function)
    return code


class LossCheck:
    """The check of a loss function in a run; threads that run copies of the last stage share it.

    Args:
        loss_fn: loss function.
        reduction: reduction of the losses of microbatches.
        note: function that is called when the check has passed.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Any], reduction: Reduction, note: Callable[[], None]) -> None:
        self._loss_fn, self._reduction, self._note = loss_fn, reduction, note
        self._held: list[tuple[Any, Any, int]] = []
        self._is_done = False
        self._lock = threading.Lock()

    def offer(self, outputs: Any, labels: Any, rows: int | None, of_batch: int) -> None:
        """Take a microbatch; the check runs as soon as there are three rows, or two if the batch has no more.

        Args:
            outputs: outputs of the last layer, on the host.
            labels: labels, on the host.
            rows: number of rows, ``None`` where it is not known.
            of_batch: number of rows of the batch.

        Raises:
            LossError: the loss of rows in one piece does not follow from those of its parts.
        """
        with self._lock:
            if self._is_done or rows is None:
                return
            outputs, labels = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (outputs, labels))
            self._held.append((outputs, labels, rows))
            if sum(count for _, _, count in self._held) < min(_ROWS, of_batch):
                return
            self._is_done = True
            held, self._held = self._held, []
        try:
            whole, parts = _pieces(held)
        except (SplitError, JoinError):  # outputs without rows, such as a loss that the last layer computes
            return
        self._compare(whole, parts)
        self._note()

    def _compare(self, whole: tuple[Any, Any], parts: Sequence[tuple[Any, Any, int]]) -> None:
        with _left_as_found(self._loss_fn):
            try:
                expected, again = self._values(*whole, seed=1), self._values(*whole, seed=2)
                found = [self._values(*part[:2], seed=1) for part in parts]
            except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError):
                return  # it wants the rows of a microbatch, no fewer
        if not _are_close([one.tensors for one in (expected[0], again[0])]):
            return  # random numbers, or a state of its own: nothing can be compared
        rows = [count for _, _, count in parts]
        if not self._is_as_stated(expected[0], [one for one, _ in found], [items for _, items in found], rows):
            raise _refused(self._reduction, expected[0], [one for one, _ in found], rows)

    def _values(self, outputs: Any, labels: Any, *, seed: int) -> tuple[LossValue, tuple[float, ...]]:
        torch.default_generator.manual_seed(seed)  # and no other: devices have theirs
        outputs, labels = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, (outputs, labels))
        with torch.no_grad(), count_items() as items:
            value = read_loss(self._loss_fn(outputs, labels))
        return value, tuple(items.counts)

    def _is_as_stated(
        self,
        expected: LossValue,
        found: Sequence[LossValue],
        items: Sequence[tuple[float, ...]],
        rows: Sequence[int],
    ) -> bool:
        if any((one.kind, len(one.tensors)) != (expected.kind, len(expected.tensors)) for one in found):
            return True  # the contract of the losses states that itself
        if expected.kind == "pair":
            weights = [one.weight or 0.0 for one in found]
            if not expected.weight or not sum(weights):
                return True
            total = torch.stack([one.tensors[0].double() for one in found if one.weight]).sum() / sum(weights)
            return _are_close([[expected.tensors[0].double() / expected.weight], [total]], of=expected)
        ways = [[count / sum(rows) for count in rows]]
        if self._reduction == "sum":
            ways.append([1.0] * len(rows))  # a script that divides by the number of microbatches itself has means
            if all(len(set(counts)) == 1 and counts[0] > 0 for counts in items):
                ways.append([counts[0] / sum(other[0] for other in items) for counts in items])
        return any(
            _are_close(
                [
                    [tensor.double() for tensor in expected.tensors],
                    [
                        torch.stack([one.tensors[k].double() * way[i] for i, one in enumerate(found)]).sum()
                        for k in range(len(expected.tensors))
                    ],
                ],
                of=expected,
            )
            for way in ways
        )


def _pieces(held: Sequence[tuple[Any, Any, int]]) -> tuple[tuple[Any, Any], list[tuple[Any, Any, int]]]:
    """Some rows, and the same rows in two parts, of which the second one has one row."""
    rows = [row for outputs, labels, count in held for row in _rows_of(outputs, labels, count)][:_ROWS]
    if len(rows) < 2:
        raise SplitError("There is one row.")
    outputs, labels, _ = _joined(rows)
    return (outputs, labels), [_joined(rows[:-1]), rows[-1]]


def _rows_of(outputs: Any, labels: Any, count: int) -> list[tuple[Any, Any, int]]:
    if count == 1:
        return [(outputs, labels, 1)]
    made = []
    for part in split_flat(FlatBatch.of((outputs,), {}, labels), count)[:_ROWS]:
        if part.rows != 1:
            raise SplitError("It is not clear which rows the outputs have.")
        (own,), _ = pytree.tree_unflatten(part.inputs, part.spec)
        made.append((own, pytree.tree_unflatten(part.labels, part.label_spec), 1))
    return made


def _joined(rows: Sequence[tuple[Any, Any, int]]) -> tuple[Any, Any, int]:
    counts = [count for _, _, count in rows]
    outputs, labels = (join([row[place] for row in rows], counts, rows=counts) for place in range(2))
    return outputs, labels, sum(counts)


def _are_close(pair: Sequence[Sequence[torch.Tensor]], of: LossValue | None = None) -> bool:
    dtypes = [tensor.dtype for tensor in (pair[0] if of is None else of.tensors)]
    limit = max(_TOLERANCE.get(dtype, 1e-4) for dtype in dtypes)
    return all(
        torch.allclose(one.double().cpu(), other.double().cpu(), rtol=limit, atol=limit * 1e-2, equal_nan=True)
        for one, other in zip(*pair, strict=True)
    )


def _refused(
    reduction: Reduction, expected: LossValue, found: Sequence[LossValue], rows: Sequence[int]
) -> RoundPipeError:
    def text(value: LossValue) -> str:
        numbers = ", ".join(f"{tensor.item():.4g}" for tensor in value.tensors)
        return numbers if value.weight is None else f"({numbers}, {value.weight:g})"

    parts = " and ".join(f"{text(one)} for {count}" for one, count in zip(found, rows, strict=True))
    stated = {
        "mean": 'a mean over rows, as loss_reduction="mean" states',
        "sum": "a sum or a mean over rows or labels",
    }[reduction]
    return LossError(
        f"loss_fn returns {text(expected)} for {sum(rows)} rows, and {parts} of them. So it is not {stated}, and would "
        "be another loss for each split of a batch. If it compares rows with each other, compute it once of all rows:\n"
        '    RoundPipeRunConfig(loss_reduction="joined")\n'
        "If it is a mean over other items than rows, return the sum and the number of items:\n"
        "    return WeightedLoss(total, number)"
    )


@contextlib.contextmanager
def _left_as_found(loss_fn: Any) -> Iterator[None]:
    """Restore the generators of the host, which no other thread has meanwhile, and the buffers of a loss."""
    buffers = [(buffer, buffer.clone()) for buffer in loss_fn.buffers()] if isinstance(loss_fn, nn.Module) else []
    with generator_alone():
        drawn = torch.default_generator.get_state()
        states = [(one, one.get()) for one in (*held_generators(loss_fn), *process_generators())]
        try:
            yield
        finally:
            torch.default_generator.set_state(drawn)
            for one, state in states:
                one.set(state)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
