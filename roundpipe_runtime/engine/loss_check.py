"""Check on its first rows that a loss function matches the reduction that was stated.

::

    rows 0 to 2 in one piece      loss_fn -> 0.93
    rows 0 and 1, and row 2       loss_fn -> 0.90, 0.99    mean: (2 * 0.90 + 1 * 0.99) / 3 = 0.93, as stated

A loss that compares rows with each other passes no such check, and would be another one for each split of a batch.
The same holds for one that chooses rows by values, also where these rows have none that it treats otherwise; see
`loss_trial`. The function is called some times more for it, once in a training for each kind of labels.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from yobx_flatten.private_names.of_torch import pytree

from ..batch.flat import FlatBatch
from ..batch.loss import LossValue
from ..batch.splitting import split_flat
from ..errors import JoinError, LossError, RoundPipeError, RoundPipeWarning, SplitError, warn
from .loss_trial import NotCallableError, Reduction, Refusal, Row, try_rows
from .recompute.generators import generators_kept

__all__ = ["LossCheck", "LossChecks", "loss_code"]

# Rows that are enough for two parts with different numbers of rows.
_ROWS = 3


class LossChecks:
    """Which loss functions were checked: by their code, the reduction, and the kind of their labels."""

    def __init__(self) -> None:
        self._done: set[Hashable] = set()

    def of(
        self, loss_fn: Callable[[Any, Any], Any], reduction: Reduction, labels: Sequence[Any] = ()
    ) -> LossCheck | None:
        """Return the check of a loss function; ``None`` if it was checked, or carries weights that were proven."""
        if getattr(loss_fn, "has_proven_weights", False):
            return None
        key = loss_code(loss_fn), reduction, tuple(map(_kind, labels))
        return None if key in self._done else LossCheck(loss_fn, reduction, functools.partial(self._done.add, key))


def loss_code(function: Any) -> Hashable:
    """Return what stays the same where a script makes its loss function anew in each step."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = function.func
    code: Hashable = getattr(getattr(function, "__func__", function), "__code__", None) or id(function)
    return code


def _kind(label: Any) -> Hashable:
    return f"{label.dtype}, {label.dim()}" if isinstance(label, torch.Tensor) else type(label).__qualname__


class LossCheck:
    """The check of a loss function in a run; threads that run copies of the last stage share it."""

    # note: function that is called when the check has passed

    def __init__(self, loss_fn: Callable[[Any, Any], Any], reduction: Reduction, note: Callable[[], None]) -> None:
        self._loss_fn, self._reduction, self._note = loss_fn, reduction, note
        self._held: list[Row] = []
        self._takes_few = True
        self._is_done = self._is_unshown = False
        self._lock = threading.Lock()

    def offer(self, outputs: Any, labels: Any, rows: int | None, of_batch: int) -> None:
        """Take a microbatch; the check runs as soon as there are three rows, or two if the batch has no more.

        A loss that does not take so few rows is checked with whole microbatches.
        """
        # outputs: outputs of the last layer, on the host
        # rows: number of rows, `None` where it is not known
        with self._lock:
            if self._is_done or rows is None:
                return
            outputs, labels = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (outputs, labels))
            self._held.append((outputs, labels, rows))
            held = list(self._held)
            if sum(count for *_, count in held) < min(_ROWS, of_batch):
                return
            if self._takes_few:
                self._is_done = self._check(_few_rows, held)
                self._takes_few = False
            if not self._is_done and len(held) > 1:
                self._is_done = True
                self._is_unshown = not self._check(list, held)
            if self._is_done:
                self._held = []

    def _check(self, rows_of: Callable[[Sequence[Row]], list[Row]], held: Sequence[Row]) -> bool:
        """Check with some rows; return whether these rows are enough for it."""
        try:
            rows = rows_of(held)
            with _left_as_found(self._loss_fn):
                refusal, is_shown = try_rows(self._loss_fn, self._reduction, rows, [len(rows) - 1, 1])
        except (SplitError, JoinError, NotCallableError) as error:
            self._reason = error
            return False
        if refusal is not None:
            raise _refused(self._reduction, refusal)
        if is_shown:
            self._note()
        return True

    def finish(self) -> None:
        """Warn if nothing was shown, after a run that has succeeded: an error of the function comes first."""
        if not self._is_unshown:
            return
        self._is_unshown = False
        self._note()
        if isinstance(self._reason, NotCallableError):
            warn(
                "Whether the loss is the same for any split of a batch was not shown, as loss_fn cannot be called for "
                f"some rows more: {self._reason}. If it compares rows with each other, or chooses some of them, state "
                'it:\n    RoundPipeRunConfig(loss_reduction="joined")',
                RoundPipeWarning,
            )


def _few_rows(held: Sequence[Row]) -> list[Row]:
    rows = [row for outputs, labels, count in held for row in _rows_of(outputs, labels, count)][:_ROWS]
    if len(rows) < 2:
        raise SplitError("There is one row.")
    return rows


def _rows_of(outputs: Any, labels: Any, count: int) -> list[Row]:
    if count == 1:
        return [(outputs, labels, 1)]
    made = []
    for part in split_flat(FlatBatch.of((outputs,), {}, labels), count)[:_ROWS]:
        if part.rows != 1:
            raise SplitError("It is not clear which rows the outputs have.")
        (own,), _ = pytree.tree_unflatten(part.inputs, part.spec)
        made.append((own, pytree.tree_unflatten(part.labels, part.label_spec), 1))
    return made


def _refused(reduction: Reduction, found: Refusal) -> RoundPipeError:
    def text(value: LossValue) -> str:
        numbers = ", ".join(f"{tensor.item():.4g}" for tensor in value.tensors)
        return numbers if value.weight is None else f"({numbers}, {value.weight:g})"

    stated = {
        "mean": 'a mean over rows, as loss_reduction="mean" states',
        "sum": "a sum or a mean over rows or labels",
    }[reduction]
    when = ", where labels or what it compares have other values" if found.by_values else ""
    if found.whole is None:
        shown = (
            "loss_fn decides by values that it reads from tensors, or compares, over several rows, so what it is for "
            "another batch is not shown."
        )
    else:
        parts = " and ".join(f"{text(one)} for {count}" for one, count in zip(found.parts, found.rows, strict=True))
        shown = f"loss_fn returns {text(found.whole)} for {sum(found.rows)} rows, and {parts} of them{when}."
    return LossError(
        f"{shown} So it is not {stated}, and would be another loss for each split of a batch. If it compares rows with "
        "each other, or chooses rows by their values, compute it once of all rows:\n"
        '    RoundPipeRunConfig(loss_reduction="joined")\n'
        "If it is a mean over other items than rows, return the sum and the number of items:\n"
        "    return WeightedLoss(total, number)"
    )


@contextlib.contextmanager
def _left_as_found(loss_fn: Any) -> Iterator[None]:
    """Restore the generators of the host, which no other thread has meanwhile, and the buffers of a loss."""
    buffers = [(buffer, buffer.clone()) for buffer in loss_fn.buffers()] if isinstance(loss_fn, nn.Module) else []
    with generators_kept(loss_fn):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
