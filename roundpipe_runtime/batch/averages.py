"""Count the items that torch's losses average over, as they are computed."""

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
    """The items that the losses of one forward average over."""

    counts: list[float] = dataclasses.field(default_factory=list)  # number of items of each mean, in order
    # number of items of each mean that has a gradient, in order
    trained: list[float] = dataclasses.field(default_factory=list)
    sums: int = 0  # number of losses that are sums
    # number of losses of which nothing follows: those of each element, and those whose classes are the rows
    others: int = 0


class _Watch(TorchFunctionMode):
    def __init__(self, items: Items, averaging: Mapping[Callable[..., Any], Counted]) -> None:
        super().__init__()
        self.items, self.averaging = items, averaging
        self.ranges: list[torch.Tensor] = []
        self.counts: list[tuple[torch.Tensor | float, bool]] = []  # and whether the mean has a gradient

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
            with DisableTorchFunction():  # what is counted is not a decision of the loss
                count = _count(self.averaging[func], target, weight, kwargs.get("ignore_index", -100))
        if reduction == "none" or self._compares_rows(source, target):
            self.items.others += 1
        elif reduction == "sum":
            self.items.sums += 1
        found = func(*args, **kwargs)
        if count is not None:
            self.counts.append((count, found.requires_grad))
        return found

    def finish(self) -> None:
        """Read the counts: not before, as a value that is read ends the graph of a compiled loss."""
        counts = [(float(count), is_trained) for count, is_trained in self.counts]
        self.items.counts += [count for count, _ in counts]
        self.items.trained += [count for count, is_trained in counts if is_trained]

    def _compares_rows(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Whether the classes of a loss are the rows of the batch, as in CLIP: row n is to be like row n."""
        is_square = source.dim() == 2 and source.shape[0] == source.shape[1]
        return is_square and any(target.data_ptr() == made.data_ptr() for made in self.ranges)


def _named(args: tuple[Any, ...], kwargs: Kwargs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Input, target and weight, by position or by name."""
    given: dict[str, Any] = {"weight": None, **kwargs, **dict(zip(("input", "target", "weight"), args, strict=False))}
    return given["input"], given["target"], given["weight"]


def _count(counted: Counted, target: torch.Tensor, weight: torch.Tensor | None, ignored: int) -> torch.Tensor | float:
    if counted == "labels" and weight is not None:  # the labels come third there
        return (weight != ignored).sum()
    if counted == "rows" or target.is_floating_point():
        return float(target.shape[0] if target.dim() else 1)
    kept = target != ignored
    if isinstance(weight, torch.Tensor):
        return torch.where(kept, weight[target.where(kept, 0)], 0).sum()
    return kept.sum()


@contextlib.contextmanager
def count_items(more: Mapping[Callable[..., Any], Counted] | None = None) -> Iterator[Items]:
    """Count the items of the losses that are computed in the block."""
    # more: functions that also average, and what they count. Default: those of torch only.
    items = Items()
    watch = _Watch(items, {**_AVERAGING, **(more or {})})
    with watch:
        yield items
    watch.finish()
