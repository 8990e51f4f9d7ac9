"""Compute the exact loss and gradient of a batch from its microbatches.

The backward of a microbatch starts with an initial gradient: the gradient of the batch's loss with respect to the loss
of the microbatch. If the batch's loss is a sum, or a mean over rows, the initial gradient is known before the first
backward, and parameter gradients are not scaled later. If a loss function returns pairs ``(sum, weight)``, the total
weight of the batch is unknown when the first backward starts. For a pair ``(sum, weight)``, the backward starts with
the gradient 1 / c, where c is the power of two nearest to the number of rows in the batch. After the last microbatch,
parameter gradients are multiplied by c / total weight. Before this multiplication, the gradients of a call are stored
separately from the gradients of earlier calls. An initial gradient of about 1 / rows keeps the gradients of long
batches in the range of half precision. A multiplication by a power of two has no rounding error. An initial gradient
such as 1 / 3 has an error of up to 0.4 % in 16 bits, so gradients for a mean of 16-bit losses are also scaled later.
"""

# loss_fn returns        total loss                       initial gradient, microbatch i   later scale of the gradient
# tensor(s), "sum"       sum of values                    1                                1
# tensor(s), "mean"      sum of rows_i / rows * value_i   rows_i / rows                    1
# tensor, "items"        as of the pair (value_i * items_i, items_i)
#   in 16 bits           the same                         rows_i / c                       c / rows
# (sum, weight)          sum of sums / sum of weights     1 / c                            c / sum of weights

from __future__ import annotations

import dataclasses
import math
import numbers
import threading
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch

from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.registry.recipe.aliases import PyTree

from ..errors import ConfigError, LossError, UnevenSplitWarning, warn

# "mean": the caller states a mean over rows, which is verified in each microbatch. "rows" and "items": an earlier check
# has found a mean over rows, or over the items that torch's loss functions count.
Reduction: TypeAlias = Literal["sum", "mean", "rows", "items"]


class WeightedLoss(NamedTuple):
    """The sum of the losses of a microbatch and the number of items, such as tokens, for an exact mean over the batch.

    Attributes:
        sum: sum of the losses, a scalar tensor.
        weight: number of tokens, rows or other items in the sum. A tensor must not require grad.

    >>> def loss_fn(logits, labels):  # the mean over the tokens that count, however they are spread over microbatches
    ...     summed = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    ...     return WeightedLoss(summed, (labels != -100).sum())
    >>> loss_fn(torch.zeros(3, 2), torch.tensor([0, 1, -100])).weight
    tensor(2)
    """

    sum: torch.Tensor | float
    weight: torch.Tensor | float


class BackwardTerm(NamedTuple):
    """A loss and the gradient with which its backward starts: ``torch.autograd.backward(term.tensor, term.seed)``."""

    tensor: torch.Tensor  # loss
    seed: torch.Tensor  # gradient to start with, of the same dtype and device


@dataclasses.dataclass(frozen=True, slots=True)
class LossValue:
    """The parsed value of a loss function for one microbatch: a tensor, several tensors, or a sum and its weight."""

    kind: Literal["tensor", "sequence", "pair"]
    tensors: tuple[torch.Tensor, ...]  # loss, losses, or sum
    weight: float | None = None  # weight of a pair, as a number


def read_loss(value: Any) -> LossValue:
    """Parse the value that a loss function returned for one microbatch.

    A list of tensors is read as several losses. A plain tuple is read as a pair ``(sum, weight)`` if its second item is
    a number or an integer tensor, or if only its first item requires grad. A plain tuple of tensors that require grad
    is read as several losses. A plain tuple of two floating-point tensors without grad raises an error, because the
    tuple may be two losses, or a sum and its weight.

    Args:
        value: value that ``loss_fn(outputs, labels)`` returned.

    Returns:
        The parsed loss: its kind, its tensors, and for a pair ``(sum, weight)`` also the weight.

    Raises:
        LossError: the value is not a tensor, a sequence of tensors or a pair ``(sum, weight)``.

    >>> read_loss((torch.tensor(6.0, requires_grad=True), 3)).weight
    3.0
    """
    if isinstance(value, torch.Tensor):
        return LossValue("tensor", (_scalar(value, "the loss"),))
    if isinstance(value, WeightedLoss) or _is_pair(value):
        total, weight = value
        if isinstance(weight, torch.Tensor) and weight.requires_grad:
            raise LossError(
                "the weight of a pair (sum, weight) requires grad, but must be a constant, like the number of tokens. "
                "Detach it:\n    return WeightedLoss(total, weight.detach())"
            )
        if isinstance(weight, torch.Tensor):
            weight = _scalar(weight, "the weight").item()
        if not isinstance(weight, numbers.Real) or not math.isfinite(weight) or weight < 0:
            raise LossError(
                f"the weight of a pair (sum, weight) must be a finite number of at least 0, found {weight!r}."
            )
        if not isinstance(total, torch.Tensor):
            total = torch.tensor(float(total))
        return LossValue("pair", (_scalar(total, "the sum"),), float(weight))
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, torch.Tensor) for item in value):
        return LossValue("sequence", tuple(_scalar(item, f"loss {i}") for i, item in enumerate(value)))
    found = type(value).__qualname__
    if isinstance(value, (list, tuple)):
        found += f" of {[type(item).__qualname__ for item in value]}"
    raise LossError(
        f"loss_fn must return a tensor, a sequence of tensors or a pair (sum, weight), found {found}. To average over "
        "all tokens of all microbatches:\n    return WeightedLoss(per_token.sum(), number_of_tokens)"
    )


def _format_items(ratios: Sequence[float], rows: int) -> str:
    return " and ".join(f"{ratio * rows:g}" for ratio in ratios) + " items" if ratios else "nothing"


class LossContract:
    """Computes the loss of a batch from the losses of its microbatches, and the initial gradient of each backward.

    Each call of ``forward_backward`` creates a ``LossContract``. The threads that run the last layer call :meth:`add`
    for each microbatch; afterwards, any thread may call the other methods.

    Args:
        reduction: how losses that are tensors are joined. ``"sum"`` adds the losses. ``"mean"`` and ``"rows"`` average
            them, weighted by numbers of rows. ``"items"`` averages them, weighted by numbers of items such as tokens.
        rows: number of rows of each microbatch; ``None`` for an unknown number.

    >>> contract = LossContract("mean", [2, 1])
    >>> [term.seed for term in contract.add(0, torch.tensor(3.0, requires_grad=True))]
    [tensor(0.6667)]
    >>> [term.seed for term in contract.add(1, torch.tensor(6.0, requires_grad=True))]
    [tensor(0.3333)]
    >>> contract.total(), contract.gradient_scale()
    (tensor(4.), 1.0)
    """

    def __init__(self, reduction: Reduction, rows: Sequence[int | None]) -> None:
        if reduction not in get_args(Reduction):
            raise ConfigError(f'loss_reduction must be "sum" or "mean", found {reduction!r}.')
        self.reduction = reduction
        self.rows = tuple(rows)
        self._values: dict[int, LossValue] = {}
        self._items: dict[int, list[float]] = {}
        self._is_late = False
        self._lock = threading.Lock()

    def add(self, index: int, value: Any, items: Sequence[float] = ()) -> list[BackwardTerm]:
        """Add the loss of one microbatch, and return the tensors and initial gradients for ``torch.autograd.backward``.

        Args:
            index: index of the microbatch.
            value: value that ``loss_fn`` returned. A weight on an accelerator is copied to the host.
            items: for each mean that ``loss_fn`` computed, the number of items, such as tokens. Default: unknown.

        Returns:
            The losses that require grad, each with its initial gradient. The returned list is empty if the weight of
            the microbatch is 0, because the microbatch then has a gradient of zero, even if its loss is NaN.

        Raises:
            LossError: ``value`` is not a loss, or its kind differs between microbatches. With reduction ``"mean"``, the
                number of items per row must not differ. With ``"items"``, a tensor needs exactly one number of items.
        """
        try:
            read = read_loss(value)
        except LossError as error:
            raise LossError(f"microbatch {index}: {error}") from None
        if read.kind == "tensor" and self.reduction == "items":  # a mean over items becomes their sum and number
            if len(set(items)) != 1:
                raise LossError(
                    f"loss_fn computes {len(items)} means, over {_format_items(items, 1)}, but RoundPipe combines one "
                    "mean per microbatch. Return the sum and the number of items, or compute one loss for the whole "
                    'batch:\n    return WeightedLoss(total, number)\n    RoundPipeRunConfig(loss_reduction="joined")'
                )
            read = LossValue("pair", (read.tensors[0] * items[0],), items[0])
        self.add_value(index, dataclasses.replace(read, tensors=tuple(t.detach() for t in read.tensors)))
        if read.kind != "pair" and self.reduction == "mean" and (rows := self.rows[index]):
            with self._lock:
                self._items[index] = found = [count / rows for count in items]
                other, one = next(iter(self._items.items()))
            if len(one) != len(found) or not all(map(math.isclose, one, found)):
                raise LossError(
                    f"loss_fn takes the mean over {_format_items(found, rows)} in microbatch {index} of {rows} rows, "
                    f"and over {_format_items(one, self.rows[other] or 1)} in microbatch {other} of "
                    f"{self.rows[other]}. The average over microbatches, weighted by rows "
                    '(loss_reduction="mean"), is not the loss of the batch. Return the sum and the divisor:\n'
                    '    summed = cross_entropy(outputs, labels, reduction="sum")\n'
                    "    return WeightedLoss(summed, (labels != -100).sum())"
                )
        if self.kind == "pair":
            seed = 1 / self._unit()
        elif self.reduction == "sum":
            seed = 1.0
        else:
            known = self._known_rows()
            seed = known[index] / (self._unit() if self._is_late else max(sum(known), 1))
        if read.weight == 0 or seed == 0:
            return []
        return [BackwardTerm(t, torch.full_like(t, seed)) for t in read.tensors if t.requires_grad]

    def add_value(self, index: int, read: LossValue) -> None:
        """Add the loss of a microbatch whose backward has already run, for example on another rank.

        Args:
            index: index of the microbatch.
            read: loss of the microbatch as returned by :func:`read_loss`, with detached tensors.

        Raises:
            LossError: the loss function returned another kind of loss for another microbatch.
        """
        with self._lock:
            for other, before in self._values.items():
                if (before.kind, len(before.tensors)) != (read.kind, len(read.tensors)):
                    kinds = {"tensor": "a tensor", "sequence": "{} tensors", "pair": "a pair (sum, weight)"}
                    here, there = (kinds[value.kind].format(len(value.tensors)) for value in (read, before))
                    raise LossError(
                        f"loss_fn returned {here} for microbatch {index}, and {there} for microbatch {other}. All "
                        "microbatches must return the same kind of loss."
                    )
            if not self._values:
                is_short = read.tensors[0].dtype in (torch.float16, torch.bfloat16)
                self._is_late = read.kind == "pair" or (self.reduction != "sum" and is_short)
            self._values[index] = read

    def values(self) -> dict[int, LossValue]:
        """Return the losses that have been added, by the index of their microbatch."""
        with self._lock:
            return dict(self._values)

    @property
    def kind(self) -> str | None:
        """Type of each loss: ``"tensor"``, ``"sequence"`` or ``"pair"``; ``None`` before the first loss is added."""
        return next((value.kind for value in self.values().values()), None)

    @property
    def weights(self) -> list[float]:
        """The weight of each microbatch in averages over the batch; by default, its number of rows."""
        return [self._weight(index) for index in range(len(self.rows))]

    def gradient_scale(self) -> float:
        """Return, after the last microbatch, the factor by which to multiply the accumulated gradient.

        The factor is ``1.0`` if the gradient needs no scaling, and ``0.0`` if all weights of microbatches are 0.
        """
        if not self._is_late:
            return 1.0
        total = math.fsum(self.weights)
        return self._unit() / total if total else 0.0

    def total(self) -> torch.Tensor | list[torch.Tensor]:
        """Return the detached loss of the whole batch: a list if ``loss_fn`` returned several losses, else a tensor.

        Raises:
            LossError: the loss of a microbatch has not been added.
        """
        missing = [index for index in range(len(self.rows)) if index not in self._values]
        if missing:
            raise LossError(f"Microbatches {missing} have no loss yet. Call add(index, loss) for each.")
        values = [self._values[index] for index in range(len(self.rows))]
        totals = [self._total(values, position) for position in range(len(values[0].tensors))]
        return totals if self.kind == "sequence" else totals[0]

    def _total(self, values: Sequence[LossValue], position: int) -> torch.Tensor:
        # a microbatch of weight 0 may return a number, so dtype and device are those of another one
        first = next((value for value in values if value.weight != 0), values[0]).tensors[position]
        weights = [1.0] * len(values)
        if self.kind == "pair" or self.reduction != "sum":
            shares = weights if self.kind == "pair" else self._known_rows()
            whole = math.fsum(self.weights)
            weights = [share / whole if weight else 0.0 for share, weight in zip(shares, self.weights, strict=True)]
        # in float64, so that the sum is as exact as the loss of the whole batch; MPS has no float64
        wide = torch.float32 if first.device.type == "mps" else torch.float64
        terms = [
            value.tensors[position].to(first.device, wide) * weight
            for value, weight in zip(values, weights, strict=True)
            if weight
        ]
        return torch.stack(terms).sum().to(first.dtype) if terms else torch.zeros_like(first)

    def _known_rows(self) -> list[int]:
        rows = [count for count in self.rows if count is not None]
        if len(rows) != len(self.rows):
            raise LossError(
                'loss_reduction="mean" weights microbatches by their rows, but the split function returns microbatches '
                "with unknown numbers of rows. Return a pair instead:\n"
                "    return WeightedLoss(per_row.sum(), number_of_rows)"
            )
        return rows

    def _weight(self, index: int) -> float:
        value = self._values.get(index)
        if value is not None and value.weight is not None:
            return value.weight
        rows = self.rows[index]
        return 1.0 if rows is None else float(rows)

    def _unit(self) -> float:
        if len(self.rows) == 1:  # the exact scale is known, and hooks that clamp gradients need it
            return self._weight(0) or 1.0
        rows = sum(count or 1 for count in self.rows)
        return 2.0 ** round(math.log2(max(rows, 1)))


def warn_if_uneven(rows: Sequence[int | None], num_microbatch: int) -> bool:
    """Warn if microbatches differ in size, because the mean of their mean losses is not the mean of the batch."""
    # Return whether a warning was given. Weighted losses, unlike those of `loss_reduction="sum"`, need no warning.
    if len(set(rows)) <= 1 and len(rows) == num_microbatch:
        return False
    warn(
        f"The microbatches have different sizes: {list(rows)} rows, for num_microbatch={num_microbatch}. "
        'loss_reduction="sum" adds the losses of microbatches. If loss_fn divides a mean by num_microbatch, the sum of '
        "these losses is not the mean of the batch. Write one of:\n"
        '    RoundPipeRunConfig(loss_reduction="mean")  # loss_fn returns the mean over its rows\n'
        "    return WeightedLoss(total, weight)  # from loss_fn",
        UnevenSplitWarning,
    )
    return True


def _is_pair(value: Any) -> bool:
    if type(value) is not tuple or len(value) != 2:
        return False
    first, second = value
    if not isinstance(first, (torch.Tensor, numbers.Real)):
        return False
    if not isinstance(second, torch.Tensor):
        return isinstance(second, numbers.Real)  # also NumPy's numbers
    if second.requires_grad:
        return False
    if not isinstance(first, torch.Tensor) or first.requires_grad or not second.is_floating_point():
        return True
    raise LossError(
        "loss_fn returned a tuple of two tensors, none of which requires grad. Two losses and a sum with its weight "
        "look the same. Write one of\n    return WeightedLoss(total, weight)\n    return [loss, other_loss]"
    )


def _scalar(tensor: torch.Tensor, what: str) -> torch.Tensor:
    if tensor.numel() != 1:
        raise LossError(
            f"{what} has shape {tuple(tensor.shape)}, but a loss must be one number. Without loss_fn=, the output of "
            "the model is used as the loss, so pass loss_fn=. In loss_fn, reduce the loss:\n    return loss.sum()"
        )
    if tensor.is_complex():
        raise LossError(f"{what} is complex, so it has no gradient. Return a real number:\n    return loss.abs()")
    return tensor.reshape(())


def check_reaches(terms: Sequence[BackwardTerm], value: Any, outputs: PyTree) -> None:
    """Raise an error if outputs require grad but a nonzero loss does not, because nothing would be trained."""
    if terms or not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(outputs)):
        return
    read = read_loss(value)
    if read.weight != 0 and not any(tensor.requires_grad for tensor in read.tensors) and any(read.tensors):
        raise LossError(
            "Autograd finds no path from the loss to the model's outputs, so nothing would be trained. Compute the "
            "loss without .detach(), .item(), NumPy and comparisons."
        )
