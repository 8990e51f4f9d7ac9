"""Compute a cross-entropy in slices of the vocabulary or in chunks of rows, so that memory contains only some logits.

::

    forward    for each slice: compute the logits, their log-sum-exp, and the logit of the label
    backward   for each slice: compute the logits again and the gradients; copy the weight's gradient to the host

Slices are computed in ascending order, so that the order of additions does not depend on the device or the plan.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from ...engine.parameters.host_table import HostTable, TableAccess, wide
from ...errors import LossError

_MOST = 2**26  # logits that are computed at once: 256 MB in float32
_LEAST_ROWS = 64  # of a chunk: with fewer rows, reading the weight takes longer than computing with it


@dataclasses.dataclass(frozen=True, slots=True)
class _Settings:
    access: TableAccess
    slice_rows: int
    transform: Callable[[Tensor], Tensor] | None
    ignore_index: int
    smoothing: float
    kind: str  # kind of the device
    autocast: torch.dtype | None  # dtype of products under autocast

    @property
    def chunk(self) -> int:
        return max(1, _MOST // self.slice_rows)

    def logits(self, hidden: Tensor, part: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits of some tokens for a slice of the vocabulary."""
        if self.autocast is None:
            return functional.linear(hidden, part, bias)
        with torch.autocast(self.kind, dtype=self.autocast, cache_enabled=False):
            return functional.linear(hidden, part, bias)

    def of_logits(self, logits: Tensor) -> Tensor:
        values = logits if self.transform is None else self.transform(logits)
        return values.to(wide(values.dtype))


def sliced_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    transform: Callable[[Tensor], Tensor] | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    rows: int | None = None,  # ignored, because a slice has few logits per row
) -> Any:
    """Compute :func:`chunked_cross_entropy` with a weight that stays on the host and is copied slice by slice."""
    if not isinstance(weight, HostTable) or weight.access.table.slice_rows is None:
        return NotImplemented
    access, slice_rows, kind = weight.access, weight.access.table.slice_rows, hidden.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    autocast = torch.get_autocast_dtype(kind) if casts else None
    settings = _Settings(access, slice_rows, transform, ignore_index, label_smoothing, kind, autocast)
    flat = labels.reshape(-1)
    if flat.device.type == "cpu":  # on an accelerator, a wrong label makes the loss NaN, without a wait
        wrong = flat[(flat != ignore_index) & ((flat < 0) | (flat >= access.size))]
        if len(wrong):
            raise IndexError(f"Target {int(wrong[0])} is out of bounds: the head has {access.size} logits.")
    total: Tensor = _Sliced.apply(  # type: ignore[no-untyped-call] # torch does not annotate it
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, flat, settings
    )
    return total if reduction == "sum" else total / (flat != ignore_index).sum()


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, table: HostTable, bias: Tensor | None, labels: Tensor, settings: _Settings
    ) -> Tensor:
        size, chunk = settings.access.size, settings.chunk
        sums: list[Tensor] = []
        chosen = all_values = None
        for place, part in settings.access.slices(settings.slice_rows):
            found = []
            for rows in _chunks(len(hidden), chunk):
                logits = settings.logits(hidden[rows], part, None if bias is None else bias[place])
                values = settings.of_logits(logits)
                del logits
                if chosen is None:  # a label outside of the vocabulary stays NaN
                    chosen = values.new_full((len(hidden),), float("nan"))
                    all_values = values.new_zeros(len(hidden))
                found.append(values.logsumexp(-1))
                inside, at = _of_slice(labels[rows], place)
                chosen[rows] = torch.where(inside, values.gather(-1, at[:, None])[:, 0], chosen[rows])
                if settings.smoothing and all_values is not None:
                    all_values[rows] += values.sum(-1)
                del values
            sums.append(torch.cat(found) if found else hidden.new_zeros(0))
        whole = torch.logsumexp(torch.stack(sums), 0)
        ctx.settings = settings
        ctx.save_for_backward(hidden, bias, labels, whole)
        if chosen is None or all_values is None:  # no rows
            return whole.sum()
        smoothing = settings.smoothing
        losses = whole - chosen if not smoothing else whole - (1 - smoothing) * chosen - smoothing / size * all_values
        return torch.where(labels != settings.ignore_index, losses, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        hidden, bias, labels, whole = ctx.saved_tensors
        settings: _Settings = ctx.settings
        wanted = ctx.needs_input_grad
        # the mean of no losses divides by zero, but its gradient is zero
        gradient = torch.where(gradient.isfinite(), gradient, 0.0).to(whole.dtype)
        factors = torch.where(labels != settings.ignore_index, gradient, 0.0)
        of_hidden = torch.zeros_like(hidden, dtype=wide(hidden.dtype)) if wanted[0] else None
        of_bias = torch.zeros_like(bias) if bias is not None and wanted[2] else None
        for place, part in settings.access.slices(settings.slice_rows) if any(wanted) else ():
            of_part = torch.zeros_like(part) if wanted[1] else None
            for rows in _chunks(len(hidden), settings.chunk):
                logits = settings.logits(hidden[rows], part, None if bias is None else bias[place])
                with torch.enable_grad():
                    values = settings.of_logits(logits.requires_grad_())
                # whole: log-sum-exp of all logits of each row; factors: gradient of the loss of each row
                slope = (values.detach() - whole[rows, None]).exp_()
                inside, at = _of_slice(labels[rows], place)
                chosen = torch.where(inside, settings.smoothing - 1.0, 0.0).to(slope.dtype)
                slope.scatter_add_(-1, at[:, None], chosen[:, None])
                if settings.smoothing:
                    slope -= settings.smoothing / settings.access.size
                slope *= factors[rows, None]
                (slope,) = torch.autograd.grad(values, logits, slope)
                del logits, values
                if of_hidden is not None:
                    of_hidden[rows] += slope @ part.to(slope.dtype)
                if of_part is not None:
                    of_part += slope.T @ hidden[rows].to(slope.dtype)
                if of_bias is not None:
                    of_bias[place] += slope.sum(0)
                del slope
            if of_part is not None:
                settings.access.add(place, of_part)
        return None if of_hidden is None else of_hidden.to(hidden.dtype), None, of_bias, None, None


def _of_slice(labels: Tensor, place: slice) -> tuple[Tensor, Tensor]:
    """Return which labels are in a slice of the vocabulary, and the index of each label in the slice."""
    inside = (labels >= place.start) & (labels < place.stop)
    return inside, torch.where(inside, labels - place.start, 0)


def _chunks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, start + size)


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    transform: Callable[[Tensor], Tensor] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    rows: int | None = None,
) -> Tensor:
    """Compute ``cross_entropy(hidden @ weight.T + bias, labels)`` in chunks of rows, without all logits at once.

    Args:
        hidden: hidden states, ``(..., width)``.
        weight: weight of the head, ``(vocabulary, width)``.
        labels: labels, with the shape of ``hidden`` without its last axis; row i predicts label i, without a shift.
        bias: bias of the head, ``(vocabulary,)``.
        transform: elementwise function without parameters, such as a soft cap, applied to the logits before the loss.
        reduction: ``"mean"`` over the labels that are not ignored, or ``"sum"``.
        ignore_index: label that is ignored.
        label_smoothing: amount of smoothing, as for :func:`torch.nn.functional.cross_entropy`.
        rows: number of rows per chunk. Default: as many rows as have 256 MB of logits in float32, but at least 64.

    Returns:
        The loss, a scalar tensor in float32, or in float64 if the logits are in float64.

    Raises:
        LossError: the shapes do not match, or the reduction is unknown.

    >>> hidden, weight = torch.randn(2, 5, 4), torch.randn(9, 4)
    >>> labels = torch.tensor([[1, 2, -100, 8, 0], [-100, 3, 3, 4, 5]])
    >>> loss = chunked_cross_entropy(hidden, weight, labels, rows=3)
    >>> torch.allclose(loss, functional.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten()))
    True
    """
    inputs = (hidden, weight, labels)
    if has_torch_function(inputs):  # a torch function mode counts the items of losses
        watched: Tensor = handle_torch_function(
            chunked_cross_entropy, inputs, *inputs, bias=bias, transform=transform, reduction=reduction,
            ignore_index=ignore_index, label_smoothing=label_smoothing, rows=rows,
        )  # fmt: skip
        return watched
    if reduction not in ("mean", "sum"):
        raise LossError(f'reduction must be "mean" or "sum", found {reduction!r}.')
    if hidden.shape[:-1] != labels.shape or weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
        raise LossError(
            "hidden, weight and labels must have the shapes (..., width), (vocabulary, width) and (...), found "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(labels.shape)}."
        )
    rows = rows or max(_LEAST_ROWS, _MOST // max(weight.shape[0], 1))
    settings = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    run = functools.partial(_by_chunks, transform=transform, options=settings, rows=rows)
    is_trainable = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    total: Tensor = _Chunked.apply(  # type: ignore[no-untyped-call] # torch does not annotate it
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), run, is_trainable
    )
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, run: Any, is_trainable: bool
    ) -> Tensor:
        wanted = [is_trainable and needed for needed in ctx.needs_input_grad[:3]]
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.run = functools.partial(run, wanted=wanted)
        total: Tensor
        total, ctx.found = ctx.run(hidden, weight, bias, labels)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        # the mean of no losses divides by zero, but its gradient is zero
        gradient = torch.where(gradient.isfinite(), gradient, 0.0)
        saved = ctx.saved_tensors  # raises torch's error if the graph was freed
        found, ctx.found = ctx.found, None
        if found is None:  # a second backward of a retained graph: the stored gradients were scaled in the first one
            with torch.enable_grad():
                _, found = ctx.run(*saved)
        # in place, because the weight's gradient is as large as the weight
        scaled = [None if one is None else one.mul_(gradient.to(one.dtype)) for one in found]
        return (*scaled, None, None, None)


def _by_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    transform: Callable[[Tensor], Tensor] | None,
    options: dict[str, Any],
    rows: int,
    wanted: list[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    of_hidden, of_weight, of_bias = (
        torch.zeros_like(t) if want and t is not None else None
        for t, want in zip((hidden, weight, bias), wanted, strict=True)
    )
    total = torch.zeros((), dtype=wide(hidden.dtype), device=hidden.device)
    for part in _chunks(len(hidden), rows):
        logits = functional.linear(hidden[part], weight, bias)
        with torch.set_grad_enabled(any(wanted)):
            logits.requires_grad_(any(wanted))
            values = logits if transform is None else transform(logits)
            values = values.to(wide(values.dtype))
            loss = functional.cross_entropy(values, labels[part], reduction="sum", **options)
        total += loss.detach()
        if any(wanted):
            (slope,) = torch.autograd.grad(loss, logits)
            del values, loss, logits
            dtype = slope.dtype  # under autocast not the dtype of the weight
            if of_hidden is not None:
                of_hidden[part] = slope @ weight.to(dtype)
            if of_weight is not None and of_weight.dtype == dtype == hidden.dtype:
                of_weight.addmm_(slope.T, hidden[part])
            elif of_weight is not None:
                of_weight += slope.T @ hidden[part].to(dtype)
            if of_bias is not None:
                of_bias += slope.sum(0)
            del slope
    return total, [of_hidden, of_weight, of_bias]
