"""Chunked cross-entropy for large vocabularies: the logits of all tokens never exist at once.

::

    plain     logits, their float32, log_softmax, gradient       tokens x vocabulary, each
    chunked   the same of a chunk of rows, then the next one     rows x vocabulary, each

Loss and gradients of a chunk are computed together while its logits exist. Backward multiplies the stored gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from ...errors import LossError

# Numbers in the logits of a chunk: 256 MB in float32.
_CHUNK = 2**26
# Fewer rows than this would read the weight too often for what they compute with it.
_LEAST_ROWS = 64


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    rows: int | None = None,
) -> torch.Tensor:
    """Compute ``cross_entropy(hidden @ weight.T + bias, labels)`` in chunks of rows, without all logits at once.

    Args:
        hidden: hidden states, ``(..., width)``.
        weight: weight of the head, ``(vocabulary, width)``.
        labels: tokens, with the shape of ``hidden`` without its last axis; not shifted, row i predicts label i.
        bias: bias of the head, ``(vocabulary,)``.
        transform: function of the logits of any number of rows before the loss, such as a soft cap. It must be
            elementwise, and depend on no parameter.
        reduction: ``"mean"`` over the labels that are not ignored, or ``"sum"``.
        ignore_index: label that is ignored.
        label_smoothing: amount of smoothing, as for :func:`torch.nn.functional.cross_entropy`.
        rows: number of rows per chunk. Default: as many as take 256 MB of logits in float32, but at least 64.

    Returns:
        The loss, without axes, in float32, or float64 where the logits are.

    Raises:
        LossError: shapes do not fit, or the reduction is unknown.

    >>> hidden, weight = torch.randn(2, 5, 4), torch.randn(9, 4)
    >>> labels = torch.tensor([[1, 2, -100, 8, 0], [-100, 3, 3, 4, 5]])
    >>> loss = chunked_cross_entropy(hidden, weight, labels, rows=3)
    >>> torch.allclose(loss, functional.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten()))
    True
    """
    inputs = (hidden, weight, labels)
    if has_torch_function(inputs):  # a torch function mode counts the items of losses
        watched: torch.Tensor = handle_torch_function(
            chunked_cross_entropy, inputs, *inputs, bias=bias, transform=transform, reduction=reduction,
            ignore_index=ignore_index, label_smoothing=label_smoothing, rows=rows,
        )  # fmt: skip
        return watched
    if reduction not in ("mean", "sum"):
        raise LossError(f'reduction must be "mean" or "sum", found {reduction!r}.')
    if hidden.shape[:-1] != labels.shape or weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
        raise LossError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)} must be "
            "(..., width), (vocabulary, width) and (...)."
        )
    rows = rows or max(_LEAST_ROWS, _CHUNK // max(weight.shape[0], 1))
    settings = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    is_trainable = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    total: torch.Tensor = _Chunked.apply(  # type: ignore[no-untyped-call] # torch does not annotate it
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), transform, settings, rows, is_trainable
    )
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


class _Chunked(torch.autograd.Function):
    """The sum of the losses."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        transform: Callable[[torch.Tensor], torch.Tensor] | None,
        options: dict[str, Any],
        rows: int,
        is_trainable: bool,
    ) -> torch.Tensor:
        wanted = [is_trainable and needed for needed in ctx.needs_input_grad[:3]]
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.run = functools.partial(_by_chunks, transform=transform, options=options, rows=rows, wanted=wanted)
        total: torch.Tensor
        total, ctx.found = ctx.run(hidden, weight, bias, labels)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # a mean over nothing divides by zero; what it is the mean of has no slope
        gradient = torch.where(gradient.isfinite(), gradient, 0.0)
        saved = ctx.saved_tensors  # torch reports it where the graph is gone
        found, ctx.found = ctx.found, None
        if found is None:  # a second backward of a retained graph: the stored gradients were scaled in the first one
            with torch.enable_grad():
                _, found = ctx.run(*saved)
        # in place: that of the weight is as large as the weight
        scaled = [None if one is None else one.mul_(gradient.to(one.dtype)) for one in found]
        return (*scaled, None, None, None, None, None)


def _by_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    transform: Callable[[torch.Tensor], torch.Tensor] | None,
    options: dict[str, Any],
    rows: int,
    wanted: list[bool],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The sum of the losses, and its requested gradients: of hidden states, weight and bias."""
    hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    found = [
        torch.zeros_like(t) if want and t is not None else None
        for t, want in zip((hidden, weight, bias), wanted, strict=True)
    ]
    total = torch.zeros((), dtype=_wide(hidden), device=hidden.device)
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        logits = functional.linear(hidden[part], weight, bias)
        with torch.set_grad_enabled(any(wanted)):
            logits.requires_grad_(any(wanted))
            values = logits if transform is None else transform(logits)
            values = values.to(_wide(values))
            loss = functional.cross_entropy(values, labels[part], reduction="sum", **options)
        total += loss.detach()
        if any(wanted):
            (slope,) = torch.autograd.grad(loss, logits)
            del values, loss, logits
            _add(found, slope, hidden, weight, part)
            del slope
    return total, found


def _wide(values: torch.Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _add(
    found: list[torch.Tensor | None], slope: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, part: slice
) -> None:
    """Add the contribution of a chunk to the gradients of hidden states, weight and bias."""
    of_hidden, of_weight, of_bias = found
    dtype = slope.dtype  # under autocast another than that of the weight
    if of_hidden is not None:
        of_hidden[part] = slope @ weight.to(dtype)
    if of_weight is not None and of_weight.dtype == dtype == hidden.dtype:
        of_weight.addmm_(slope.T, hidden[part])
    elif of_weight is not None:
        of_weight += slope.T @ hidden[part].to(dtype)
    if of_bias is not None:
        of_bias += slope.sum(0)
