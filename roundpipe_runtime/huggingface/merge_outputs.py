"""Merge the outputs and losses of microbatches into those of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from yobx_flatten.recipe.aliases import Kwargs, PyTree

from ..batch.joining import join
from ..batch.loss import WeightedLoss
from ..device.transfer import Static
from .batches import join_outputs
from .cutting.caches import is_held, join_held, swapped
from .loss.call_options import gives_share, is_proven
from .loss.moe_aux_loss import (
    batch_auxiliary_loss,
    has_auxiliary_loss,
    has_router_logits,
    without_auxiliary_loss,
)
from .loss.weights import check_weights, has_labels, loss_of, loss_of_batch, with_loss


def loss_fn_with_weight(
    loss_fn: Callable[[Any, Any], Any],
    batch: Callable[[], int] | None,
    *,
    is_share: bool = False,
    is_proven: bool = True,
) -> Callable[[Any, Any], Any]:
    """Return a loss function for outputs that carry the weight of their loss."""
    # batch: function that returns the rows of the batch, for models that compute their loss; `None` for others

    def weighted_loss(outputs: PyTree, labels: Any) -> Any:
        output, count, rows = outputs
        result = loss_fn(output, labels)
        if batch is None or not isinstance(result, torch.Tensor):
            return result
        if rows < batch():
            check_weights([count, count], is_share=is_share, is_proven=is_proven)
        elif not 0 < count < math.inf:  # the whole batch
            return WeightedLoss(result, 1.0)
        if count < 0:  # already a share of the batch's loss: shares are added
            return WeightedLoss(result, rows / batch())
        return WeightedLoss(result * count, count)

    # The loss of the model was checked before. A loss function of the caller is checked here.
    weighted_loss.has_proven_weights = batch is not None  # type: ignore[attr-defined] # an attribute of a function
    weighted_loss.__wrapped__ = loss_fn  # type: ignore[attr-defined] # an attribute of a function
    return weighted_loss


def _joined(outputs: list[PyTree]) -> PyTree:
    """Merge the outputs of microbatches with the weights of their losses."""
    rows = [count for _, _, count in outputs]
    return join_outputs([output for output, _, _ in outputs], [float(count) for count in rows], rows)


def merge_with_cache(cache: Any, merge: Callable[[list[PyTree]], PyTree], outputs: list[PyTree]) -> PyTree:
    """Merge outputs that hold caches, and update the caller's cache."""
    # cache: cache of the caller. It then holds what all microbatches wrote.
    # merge: merge function for outputs without caches
    # outputs: `(output, items, rows)` of each microbatch
    rows = [count for _, _, count in outputs]
    held = [next((v for v in _items(output) if is_held(v)), None) for output, _, _ in outputs]
    mark = Static()  # a leaf without tensors, which `merge` passes on: it marks the place of the cache in the output
    parts = [(swapped(output, {id(one): mark}), *rest) for (output, *rest), one in zip(outputs, held, strict=True)]
    joined = merge(parts)
    found = [one for one in held if one is not None]
    if len(found) == len(parts):
        join_held(cache, found, rows)
    return swapped(joined, {id(mark): cache})


def _items(output: PyTree) -> list[Any]:
    return list(output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ())


def merge_as_asked(merge: Any, outputs: list[PyTree]) -> PyTree:
    """Merge outputs as the ``merge_output`` of the caller states."""
    # outputs: `(output, items, rows)` of each microbatch
    rows = [count for _, _, count in outputs]
    return join([output for output, _, _ in outputs], [float(count) for count in rows], rows=rows, merge=merge)


def merge_with_loss(model: nn.Module, kwargs: Kwargs, is_smoothed: bool, outputs: list[PyTree]) -> PyTree:
    """Merge outputs so that their loss is the loss of the whole batch."""
    # outputs: `(output, items, rows)` of each microbatch
    parts = [output for output, _, _ in outputs]
    losses = [loss for loss in map(loss_of, parts) if loss is not None]
    has_loss = len(losses) == len(parts) and (is_smoothed or has_labels(model, kwargs) or _named_loss(parts[0]))
    items = [count for _, count, _ in outputs]
    if has_loss:
        check_weights(items, is_share=gives_share(kwargs), is_proven=is_proven(kwargs))
    joined = _joined(outputs)
    aux = batch_auxiliary_loss(model, joined, parts, kwargs) if has_router_logits(model, kwargs) else None
    if aux is not None:
        joined["aux_loss"] = aux[0]
    if not has_loss:
        return joined
    adds_auxiliary = aux is not None and not is_smoothed and has_auxiliary_loss(model, kwargs)
    if adds_auxiliary:
        losses = [without_auxiliary_loss(model, part) for part in parts]
    loss = loss_of_batch(losses, items)
    return with_loss(joined, loss + aux[1] if adds_auxiliary and aux is not None else loss)


def _named_loss(output: PyTree) -> bool:
    """Whether an output calls something its loss; the first tensor of a tuple is one only where there are labels."""
    return (output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)) is not None


def merge_as_tuple(merge: Callable[[list[PyTree]], PyTree], outputs: list[PyTree]) -> PyTree:
    """Merge outputs to a tuple, for callers with ``return_dict=False``."""
    # outputs: `(output, items, rows)` of each microbatch
    return merge(outputs).to_tuple()
