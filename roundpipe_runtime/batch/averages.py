"""The number of items that the losses of torch average over, observed as they are computed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from yobx_flatten.private_names.of_torch import DisableTorchFunction

__all__ = ["Items", "count_items"]

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
    """The items that the losses of one forward average over.

    Attributes:
        counts: Number of items of each mean, in order.
        trained: Number of items of each mean that has a gradient, in order.
        sums: Number of losses that are sums.
    """

    counts: list[float] = dataclasses.field(default_factory=list)
    trained: list[float] = dataclasses.field(default_factory=list)
    sums: int = 0


class _Watch(TorchFunctionMode):
    def __init__(self, items: Items, averaging: Mapping[Callable[..., Any], Counted]) -> None:
        super().__init__()
        self.items, self.averaging = items, averaging

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.averaging:
            return func(*args, **kwargs)
        count = None
        if kwargs.get("reduction", "mean") == "mean":
            count = _count(self.averaging[func], *args, **kwargs)
            self.items.counts.append(count)
        else:
            self.items.sums += 1
        if type(args[0] if args else None) in (torch.Tensor, torch.nn.Parameter):
            with DisableTorchFunction():
                found = func(*args, **kwargs)
        else:
            found = func(*args, **kwargs)
        if count is not None and found.requires_grad:
            self.items.trained.append(count)
        return found


def _count(
    counted: Counted, source: torch.Tensor, target: torch.Tensor, weight: Any = None, *args: Any, **kwargs: Any
) -> float:
    if counted == "labels":  # which come third there
        return float((weight != kwargs.get("ignore_index", -100)).sum())
    if counted == "rows" or target.is_floating_point():
        return float(target.shape[0] if target.dim() else 1)
    kept = target != kwargs.get("ignore_index", -100)
    weight = weight if isinstance(weight, torch.Tensor) else kwargs.get("weight")
    if weight is not None:
        return float(weight[target[kept]].sum())
    return float(kept.sum())


@contextlib.contextmanager
def count_items(more: Mapping[Callable[..., Any], Counted] | None = None) -> Iterator[Items]:
    """Count the items of the losses that are computed in the block.

    Args:
        more: functions that also average, and what they count. Default: those of torch only.

    Yields:
        The counts, complete at the end of the block.
    """
    items = Items()
    with _Watch(items, {**_AVERAGING, **(more or {})}):
        yield items
