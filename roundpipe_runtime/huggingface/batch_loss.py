"""Compute the loss of a mixture of experts for a whole batch, of which each process has some groups of rows.

::

    model's own loss     sum of (mean x items) / items of all groups
    auxiliary loss       the model's function of the router logits of all groups, in the order of the groups

Each process has the same loss; its graph leads to the outputs of the groups of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from yobx_flatten.recipe.aliases import Kwargs, PyTree

from .batches import join_outputs
from .loss.call_options import gives_share, is_proven
from .loss.moe_aux_loss import auxiliary_loss_of, without_auxiliary_loss
from .loss.weights import check_weights, loss_of, shares_of, with_loss


class WholeBatchLoss:
    """The loss of a batch with its auxiliary loss."""

    # loss_fn: `loss_fn(outputs, label)` of the joined outputs, whose loss is that of the whole batch

    def __init__(
        self, model: nn.Module, kwargs: Kwargs, loss_fn: Callable[[Any, Any], Any], label: Any, *, as_tuple: bool
    ) -> None:
        self._model, self._label, self._loss_fn, self._as_tuple = model, label, loss_fn, as_tuple
        mask = kwargs.get("attention_mask")
        self._mask: torch.Tensor | None = mask if isinstance(mask, torch.Tensor) else None
        self._is_share, self._is_proven = gives_share(kwargs), is_proven(kwargs)
        self._next_row = 0

    def state(self, group: Sequence[PyTree]) -> dict[str, Any] | None:
        """Return what other processes need to know of a group; ``None`` for one without rows."""
        if not group:
            return None
        parts = [output for output, _, _ in group]
        rows = sum(count for _, _, count in group)
        first, self._next_row = self._next_row, self._next_row + rows
        routers = _routers(parts)
        return {
            "losses": _own_losses(self._model, parts),
            "items": [items for _, items, _ in group],
            "routers": routers,
            "mask": None if self._mask is None else self._mask[first : first + rows].reshape(1, -1),
        }

    def compute(
        self, groups: Sequence[Sequence[PyTree]], own: Sequence[int], stated: Sequence[dict[str, Any] | None]
    ) -> tuple[Any, PyTree]:
        """Return the loss of the batch and the joined output of this process; see :class:`BatchLoss`."""
        here = [group for group in groups if group]
        if not here:
            return None, None
        all_of = [dict(one) if one is not None else None for one in stated]
        for number, group in zip(own, groups, strict=True):
            if group:  # with its graph
                parts = [output for output, _, _ in group]
                own_part: Any = all_of[number]
                own_part |= {"losses": _own_losses(self._model, parts), "routers": _routers(parts)}
        found = [one for one in all_of if one is not None]
        aux = self._auxiliary(found)
        outputs = [output for group in here for output in group]
        counts = [rows for _, _, rows in outputs]
        joined = join_outputs([output for output, _, _ in outputs], [float(rows) for rows in counts], counts)
        if aux is not None:
            joined["aux_loss"] = aux[0]
        losses = [loss for one in found for loss in one["losses"]]
        if losses:
            items = [count for one in found for count in one["items"]]
            check_weights(items, is_share=self._is_share, is_proven=self._is_proven)
            joined = with_loss(joined, _total(losses, items, aux))
        output = joined.to_tuple() if self._as_tuple else joined
        return self._loss_fn(output, self._label), output

    def _auxiliary(self, stated: Sequence[dict[str, Any]]) -> Any:
        if any(one["routers"] is None for one in stated):
            return None
        masks = [one["mask"] for one in stated]
        mask = None if any(one is None for one in masks) else torch.cat(masks, 1)
        return auxiliary_loss_of(self._model, _one_after_another([one["routers"] for one in stated]), mask)


def _total(losses: Sequence[torch.Tensor], items: Sequence[float], aux: Any) -> torch.Tensor:
    """The sum of shares."""
    loss = torch.stack([loss * share for loss, share in zip(losses, shares_of(items), strict=True)]).sum()
    return loss if aux is None else loss + aux[1]


def _own_losses(model: nn.Module, parts: Sequence[PyTree]) -> list[torch.Tensor]:
    """The losses of microbatches without the auxiliary ones."""
    return [without_auxiliary_loss(model, part) for part in parts if loss_of(part) is not None]


def _routers(parts: Sequence[PyTree]) -> tuple[torch.Tensor, ...] | None:
    """The router logits of microbatches, one tensor per layer."""
    if any(getattr(part, "aux_loss", None) is None for part in parts):
        return None
    return _one_after_another([part.router_logits for part in parts])


def _one_after_another(routers: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat(list(layers)) for layers in zip(*routers, strict=True))
