"""Test on a few rows how the losses of microbatches must be weighted to add up to the loss of the batch."""

# rows 0 to 2       loss 0.93     gradients at the outputs for rows 0, 1 and 2, and at parameters of the loss
# rows 0 and 1      loss 0.90     weighted by rows: (2 * 0.90 + 1 * 0.99) / 3 = 0.93, and the same for each gradient
# row 2             loss 0.99
#
# Weights (rows, items that torch's loss functions average over, or 1) are accepted if the sums are equal in value and
# gradients, also with changed labels and outputs. A loss that compares or selects rows has no such weights.

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from yobx_flatten.core.compare import compare, tolerance
from yobx_flatten.core.private_names.of_torch import DisableTorchFunction
from yobx_flatten.errors.failures import result_or
from yobx_flatten.registry.recipe.aliases import Kwargs

Way: TypeAlias = Literal["rows", "items", "sum"]
LossWay: TypeAlias = Way | Literal["joined", "whole"]
Role: TypeAlias = Literal["label", "mask", "output"]


class NotProvenError(Exception):
    """The loss function cannot be checked: it fails for a part of the batch, or its values for equal inputs differ."""


@dataclasses.dataclass(frozen=True)
class Part:
    """The losses that a loss function returned for some rows of a batch."""

    losses: Sequence[torch.Tensor]  # with their graphs
    rows: int
    items: float | None = None  # number of items that a mean was taken over; `None` if it is not known
    weight: float | None = None  # weight of a pair `(sum, weight)`

    @property
    def value(self) -> str:
        numbers = ", ".join(f"{loss.item():.4g}" for loss in self.losses)
        return numbers if self.weight is None else f"({numbers}, {self.weight:g})"


@dataclasses.dataclass(frozen=True)
class Proof:
    way: Way | None  # `None` if there are no such weights
    compared: int = 0  # number of sets of values that were compared
    shown: str | None = None  # losses that no weights fit
    is_pair: bool = False  # whether the loss states its weight


@dataclasses.dataclass(frozen=True)
class LossProof:
    """How ``forward_backward`` computes a loss: as a weighted sum over microbatches, or once for the whole batch."""

    # `"items"`, `"rows"` or `"sum"`: in microbatches, with these weights. `"joined"`: once, from the outputs of layers
    # for all rows. `"whole"`: in one microbatch.
    way: LossWay
    reason: str = ""  # reason for `"joined"` and `"whole"`; empty otherwise
    compared: int = 0  # number of sets of values that were compared; 0 if another batch may give another result
    is_late: bool = False  # whether gradients are scaled after the last microbatch
    row_nbytes: int = 0  # bytes of the layers' outputs for one row, which a joined loss holds for the whole batch

    @property
    def is_sum(self) -> bool:
        return self.way not in ("joined", "whole")

    def __str__(self) -> str:
        if not self.is_sum:
            how = "once for the whole batch" if self.way == "joined" else "in one microbatch"
            return f"computed {how}: {self.reason}"
        weights = {"items": "weighted by the items they count", "rows": "weighted by rows", "sum": "added"}[self.way]
        return f"losses of microbatches are {weights}, checked with {self.compared} sets of labels and masks"


# One evaluation: the loss of the rows whole and in parts, and the leaves of the gradients.
Evaluation: TypeAlias = tuple[Part, Sequence[Part], Sequence[torch.Tensor]]
Values: TypeAlias = Sequence[torch.Tensor]


def prove(
    evaluate: Callable[[Values], Evaluation], changes: Iterable[Values], ways: Sequence[Way], *, as_stated: bool = False
) -> Proof:
    """Find out how the losses of subsets of rows must be weighted to add up to the loss of all rows."""
    # changes: values of the columns, first those of the batch
    # as_stated: whether values with different numbers of items per row are skipped, because the caller stated a mean
    # over rows, and each microbatch checks the items
    left, compared, is_pair = list(ways), 0, False
    for number, values in enumerate(changes):
        found = result_or(functools.partial(evaluate, values), lambda error: error)
        if isinstance(found, Exception):
            if number == 0:
                raise NotProvenError(f"the loss fails on part of the batch: {type(found).__name__}: {found}") from found
            continue  # the loss rejects these labels
        whole, parts, leaves = found
        is_pair = is_pair or whole.weight is not None
        items = {None if one.items is None else round(one.items / one.rows, 9) for one in (whole, *parts)}
        kinds = {(len(one.losses), one.weight is None) for one in (whole, *parts)}
        if len(kinds) > 1 or whole.items == 0 or whole.weight == 0 or (as_stated and len(items) > 1):
            continue
        if not all(bool(loss.isfinite()) for loss in whole.losses) or all(part.weight == 0 for part in parts):
            continue
        difference = _Difference(whole, parts, leaves)
        if difference.is_of_zeros:
            continue  # any weights are right, as for rows that a mask leaves out
        compared += 1
        left = [way for way in left if difference.is_none(way)]
        if not left:
            again = evaluate(values)[0].losses
            pairs = zip(whole.losses, again, strict=False)
            if len(whole.losses) != len(again) or not all(compare(*pair, "sums") for pair in pairs):
                raise NotProvenError("the loss function returned different values for equal arguments")
            returned = " and ".join(f"{part.value} for {part.rows}" for part in parts)
            when = ", where labels or outputs have other values" if number else ""
            return Proof(None, compared, f"{whole.value} for {whole.rows} rows, and {returned} of them{when}")
    return Proof(left[0] if compared else None, compared, is_pair=is_pair)


class _Difference:
    def __init__(self, whole: Part, parts: Sequence[Part], leaves: Sequence[torch.Tensor]) -> None:
        self._whole, self._parts, self._leaves = whole, parts, leaves
        self._factor = 1.0 if whole.weight is None else 1 / whole.weight
        self._expected = self._norms([loss * self._factor for loss in whole.losses])
        sizes = [norm / math.sqrt(max(leaf.numel(), 1)) for norm, leaf in zip(self._expected, leaves, strict=True)]
        self._typical = max((size for size in sizes if math.isfinite(size)), default=0.0)
        # the gradient of a difference is the difference of gradients, so norms are compared without a second gradient
        self._known: dict[tuple[float, ...], bool] = {}  # two ways have the same shares if all labels count
        losses = [loss for one in (whole, *parts) for loss in one.losses]
        self.is_of_zeros = not any(self._expected) and not any(bool(loss.any()) for loss in losses)

    def is_none(self, way: Way) -> bool:
        if self._whole.weight is not None:
            total = sum(part.weight or 0.0 for part in self._parts)
            shares = tuple(1 / total if part.weight else 0.0 for part in self._parts)
        elif way == "sum":
            shares = (1.0,) * len(self._parts)
        else:
            counts: list[float | None] = [float(part.rows) if way == "rows" else part.items for part in self._parts]
            known = [count for count in counts if count is not None and math.isfinite(count) and count >= 0]
            if len(known) < len(counts) or not sum(known):
                return False
            shares = tuple(count / sum(known) for count in known)
        if shares not in self._known:
            self._known[shares] = self._is_none(shares)
        return self._known[shares]

    def _is_none(self, shares: Sequence[float]) -> bool:
        counted = [(part, share) for part, share in zip(self._parts, shares, strict=True) if share]
        differences = []
        for number, loss in enumerate(self._whole.losses):
            total = sum((part.losses[number].to(loss) * share for part, share in counted), loss.new_zeros(()))
            if not compare(loss * self._factor, total, "sums"):
                return False
            differences.append(loss * self._factor - total)
        limit = max(tolerance("sums", leaf.dtype) for leaf in self._leaves) if self._leaves else 0.0
        return all(
            norm <= limit * max(expected, 0.1 * self._typical * math.sqrt(leaf.numel()), 1e-30)
            for norm, expected, leaf in zip(self._norms(differences), self._expected, self._leaves, strict=True)
        )

    def _norms(self, losses: Sequence[torch.Tensor]) -> list[float]:
        trained = [loss for loss in losses if loss.requires_grad]
        if not trained or not self._leaves:
            return [0.0] * len(self._leaves)
        ones = [torch.ones_like(one) for one in trained]
        found: Sequence[torch.Tensor | None] = torch.autograd.grad(trained, self._leaves, ones, True, allow_unused=True)
        return [0.0 if one is None else _norm(one) for one in found]


def in_32_bits(value: Any) -> Any:
    is_short = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_short else value


def _norm(gradient: torch.Tensor) -> float:
    dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
    wide = torch.complex128 if dense.dtype.is_complex else torch.float64
    return float(torch.linalg.vector_norm(dense, dtype=wide))


@dataclasses.dataclass(frozen=True)
class Column:
    value: torch.Tensor
    axis: int  # axis of the rows
    role: Role
    others: object = None  # labels of further rows, from which random labels are also drawn


def variants(columns: Sequence[Column], ignored: Sequence[int] = (-100,)) -> Iterator[list[torch.Tensor]]:
    """Yield arguments with which a loss function is checked: the outputs, labels and masks, then changed copies."""
    # ignored: labels that losses ignore
    yield [one.value for one in columns]
    draw = torch.Generator().manual_seed(5)
    for size in (1.0, 0.1, 8.0):  # outputs scaled row by row
        yield [_scaled(one, size, draw) if one.role == "output" else _drawn(one, draw) for one in columns]
    if not any(one.role == "output" for one in columns) or len(columns) > 1:
        for extra in ((0, 1), ()):
            yield [one.value if one.role == "output" else _drawn(one, draw, extra) for one in columns]
    columns = [  # labels that are all 0 or 1 may be a mask
        dataclasses.replace(one, value=torch.ones_like(one.value))
        if one.role == "label" and bool(((one.value == 0) | (one.value == 1)).all())
        else one
        for one in columns
    ]
    yield [one.value for one in columns]
    for filling in ignored:
        for keeps in (0, 1):
            yield [_cleared(one, filling, keeps) if one.role == "label" else one.value for one in columns]
    for column in columns:  # a row keeps one place of a mask, because losses expect at least one
        if column.role == "mask" and column.value.dim() > 1:
            yield [_cleared(one, 0, 1) if one is column else one.value for one in columns]
        if column.role == "label" and bool((column.value == 1).all()):
            yield [_cleared(one, 0, 0) if one is column else one.value for one in columns]


def _scaled(column: Column, size: float, draw: torch.Generator) -> torch.Tensor:
    value = column.value
    if not value.is_floating_point():
        return value
    noise = torch.rand(value.shape, generator=draw, dtype=torch.float32) - 0.5
    factors = size ** torch.linspace(0, 1, value.shape[column.axis])
    shape = [-1 if axis == column.axis else 1 for axis in range(value.dim())]
    scale = value.detach().double().std(correction=0).clamp(min=1e-3)
    return ((value.detach().double() + noise * scale) * factors.reshape(shape)).to(value.dtype)


def _drawn(column: Column, draw: torch.Generator, extra: Sequence[int] = ()) -> torch.Tensor:
    value = column.value
    if column.role == "mask" or value.is_complex():
        return value
    more, given = column.others, torch.tensor(extra, dtype=value.dtype)
    also = [more.flatten()] if isinstance(more, torch.Tensor) and more.dtype == value.dtype else []
    pool: torch.Tensor = torch.unique(torch.cat([value.flatten(), *also, given]))
    drawn = pool[torch.randint(len(pool), value.shape, generator=draw)]
    if not value.is_floating_point():
        return drawn
    # numbers also shrink, unless they may be a mask of zeros and ones
    return drawn if extra else (drawn * torch.rand(value.shape, generator=draw)).to(value.dtype)


def _cleared(column: Column, filling: int, keeps: int) -> torch.Tensor:
    # copies the labels or the mask, and fills the last row with padding, except the last `keeps` positions of this row
    value = column.value.clone()
    last = value.select(column.axis, value.shape[column.axis] - 1)
    is_whole = value.is_floating_point() or value.dtype == torch.bool
    if keeps < last.numel():
        kept = last.flatten()[last.numel() - keeps :].clone()
        last.fill_(0 if is_whole else filling)
        if keeps:
            last[tuple(size - 1 for size in last.shape)] = kept[-1] if column.role == "label" else 1
    return value


# -- what is counted and held constant while a loss is computed -------------------------------------------------------

Counted: TypeAlias = Literal["tokens", "labels", "rows"]

_AVERAGING: dict[Callable[..., Any], Counted] = {
    functional.cross_entropy: "tokens",
    functional.nll_loss: "tokens",
    functional.mse_loss: "rows",
    functional.l1_loss: "rows",
    functional.smooth_l1_loss: "rows",
    functional.binary_cross_entropy_with_logits: "rows",
    functional.binary_cross_entropy: "rows",
}


@dataclasses.dataclass
class Items:
    counts: list[float] = dataclasses.field(default_factory=list)  # number of items of each mean, in order
    trained: list[float] = dataclasses.field(default_factory=list)  # number of items of each mean with a gradient
    sums: int = 0  # number of losses that are sums
    others: int = 0  # number of losses without a count: elementwise losses, and losses whose classes are the rows


class _Watch(TorchFunctionMode):
    def __init__(self, items: Items, averaging: Mapping[Callable[..., Any], Counted]) -> None:
        super().__init__()
        self.items, self.averaging = items, averaging
        self.ranges: list[torch.Tensor] = []
        self.counts: list[tuple[torch.Tensor | float, bool]] = []  # count, and whether the mean has a gradient

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange:
            self.ranges.append(func(*args, **kwargs))
            return self.ranges[-1]
        if func not in self.averaging:
            return func(*args, **kwargs)
        given: Kwargs = {"weight": None, **kwargs, **dict(zip(("input", "target", "weight"), args, strict=False))}
        source, target, weight = given["input"], given["target"], given["weight"]
        count, reduction = None, kwargs.get("reduction", "mean")
        if reduction == "mean":
            with DisableTorchFunction():  # the operations of the count are not operations of the loss
                count = _count(self.averaging[func], target, weight, kwargs.get("ignore_index", -100))
        # classes that are the rows of the batch, as in CLIP, where row n has label n
        is_square = reduction != "none" and source.dim() == 2 and source.shape[0] == source.shape[1]
        compares_rows = is_square and any(target.data_ptr() == made.data_ptr() for made in self.ranges)
        if reduction == "none" or compares_rows:
            self.items.others += 1
        elif reduction == "sum":
            self.items.sums += 1
        found = func(*args, **kwargs)
        if count is not None:
            self.counts.append((count, found.requires_grad))
        return found


def _count(counted: Counted, target: torch.Tensor, weight: torch.Tensor | None, ignored: int) -> torch.Tensor | float:
    if counted == "labels" and weight is not None:  # the third argument is then the labels
        return (weight != ignored).sum()
    if counted == "rows" or target.is_floating_point():
        return float(target.shape[0] if target.dim() else 1)
    kept = target != ignored
    if isinstance(weight, torch.Tensor):
        return torch.where(kept, weight[target.where(kept, 0)], 0).sum()
    return kept.sum()


@contextlib.contextmanager
def count_items(more: Mapping[Callable[..., Any], Counted] | None = None) -> Iterator[Items]:
    """Count the items over which torch's loss functions average when they are called in the with block."""
    # more: further functions that average, and what they count
    items = Items()
    watch = _Watch(items, {**_AVERAGING, **(more or {})})
    with watch:
        yield items
    # read after the loss is computed, because an earlier read would break the graph of a compiled loss
    counts = [(float(count), is_trained) for count, is_trained in watch.counts]
    items.counts += [count for count, _ in counts]
    items.trained += [count for count, is_trained in counts if is_trained]


_DROPOUTS = (functional.dropout, functional.alpha_dropout, functional.feature_alpha_dropout, functional.dropout1d,
             functional.dropout2d, functional.dropout3d)  # fmt: skip

# Functions that apply dropout, and the index of the dropout probability among their arguments.
_PLACES = {functional.scaled_dot_product_attention: 4, functional.multi_head_attention_forward: 10}


def _check_targets(log_probs: torch.Tensor, targets: torch.Tensor, lengths: Any) -> None:
    # For other targets, torch's CTC kernel reads memory outside of its tensors, which can end the process. Labels that
    # are changed for a trial may be such targets, if a model's padding is not -100.
    if targets.dim() > 1:
        targets = targets[torch.arange(targets.shape[1]) < torch.as_tensor(lengths).cpu()[:, None]]
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < log_probs.shape[-1]:
        raise IndexError(f"CTC targets must be from 0 to {log_probs.shape[-1] - 1}")


class NoDropout(TorchFunctionMode):
    """Disables dropout in the with block, and refuses CTC targets that torch does not check."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (functional.ctc_loss, torch.ctc_loss):
            given = {**kwargs, **dict(zip(("log_probs", "targets", "", "target_lengths"), args, strict=False))}
            with DisableTorchFunction():
                _check_targets(given["log_probs"], given["targets"].cpu(), given["target_lengths"])
        if func in _DROPOUTS:  # called, because a placeholder gets its values at the first operation
            return func(args[0] if args else kwargs["input"], 0.0, training=False)
        place = _PLACES.get(func)
        if place is not None and len(args) > place:
            args = (*args[:place], 0.0, *args[place + 1 :])
        elif place is not None and "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return self.call(func, args, kwargs)

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class SteadyDraws(NoDropout):
    """Replaces random numbers that are drawn in the with block with fixed numbers, and disables dropout."""

    # A tensor of n random integers becomes n - 1, n - 2, ..., 0, so `torch.randperm(n)` still returns a permutation.
    # generator: random generator of the device, such as `torch.Generator`. Default: only the host draws.
    # types: set to which the dtypes of computed tensors are added

    def __init__(self, generator: Any = None, types: set[torch.dtype] | None = None) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set() if types is None else types
        self._generators = [torch.default_generator, *([] if generator is None else [generator])]

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # flex attention compiles itself, and states cannot be read in a trace
            return func(*args, **kwargs)
        before = [one.get_state() for one in self._generators]
        found = func(*args, **kwargs)
        if isinstance(found, torch.Tensor):
            self.types.add(found.dtype)
        is_drawn = isinstance(kwargs.get("generator"), torch.Generator) or not all(
            torch.equal(one, own.get_state()) for one, own in zip(before, self._generators, strict=True)
        )
        if is_drawn and isinstance(found, torch.Tensor):
            with torch.no_grad():
                fixed = torch.arange(found.numel()).flip(0).reshape(found.shape) % 2**31
                found.copy_(torch.tensor(0.5) if found.is_floating_point() else fixed)
        return found
