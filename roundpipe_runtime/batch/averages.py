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
from yobx_flatten.recipe.aliases import Kwargs

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
        others: Number of losses of which nothing follows: those of each element, and those whose classes are the rows.
    """

    counts: list[float] = dataclasses.field(default_factory=list)
    trained: list[float] = dataclasses.field(default_factory=list)
    sums: int = 0
    others: int = 0


class _Watch(TorchFunctionMode):
    def __init__(self, items: Items, averaging: Mapping[Callable[..., Any], Counted]) -> None:
        super().__init__()
        self.items, self.averaging = items, averaging
        self.ranges: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange:
            self.ranges.append(func(*args, **kwargs))
            return self.ranges[-1]
        if func not in self.averaging:
            return func(*args, **kwargs)
        source, target, weight = _named(args, kwargs)
        count, reduction = None, kwargs.get("reduction", "mean")
        if reduction == "mean":
            count = _count(self.averaging[func], source, target, weight, kwargs.get("ignore_index", -100))
            self.items.counts.append(count)
        if reduction == "none" or self._compares_rows(source, target):
            self.items.others += 1
        elif reduction == "sum":
            self.items.sums += 1
        if type(args[0] if args else None) in (torch.Tensor, torch.nn.Parameter):
            with DisableTorchFunction():
                found = func(*args, **kwargs)
        else:
            found = func(*args, **kwargs)
        if count is not None and found.requires_grad:
            self.items.trained.append(count)
        return found

    def _compares_rows(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Whether the classes of a loss are the rows of the batch, as in CLIP: row n is to be like row n."""
        is_square = source.dim() == 2 and source.shape[0] == source.shape[1]
        return is_square and any(target.data_ptr() == made.data_ptr() for made in self.ranges)


def _named(args: tuple[Any, ...], kwargs: Kwargs) -> list[Any]:
    """Input, target and weight, by position or by name."""
    names = ("input", "target", "weight")
    return [args[place] if len(args) > place else kwargs.get(name) for place, name in enumerate(names)]


def _count(counted: Counted, source: torch.Tensor, target: torch.Tensor, weight: Any, ignored: int) -> float:
    if counted == "labels":  # which come third there
        return float((weight != ignored).sum())
    if counted == "rows" or target.is_floating_point():
        return float(target.shape[0] if target.dim() else 1)
    kept = target != ignored
    if isinstance(weight, torch.Tensor):
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
