"""Count the items that a loss averages over, and replace random draws by constants while a loss is checked."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol, TypeAlias

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
    """The numbers of items (tokens, labels or rows) over which the losses of one forward are averaged."""

    counts: list[float] = dataclasses.field(default_factory=list)  # number of items of each mean, in order
    # number of items of each mean that has a gradient, in order
    trained: list[float] = dataclasses.field(default_factory=list)
    sums: int = 0  # number of losses that are sums
    # number of losses without a count: elementwise losses, and losses whose classes are the rows
    others: int = 0


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
        if reduction == "none" or self._compares_rows(source, target):
            self.items.others += 1
        elif reduction == "sum":
            self.items.sums += 1
        found = func(*args, **kwargs)
        if count is not None:
            self.counts.append((count, found.requires_grad))
        return found

    def finish(self) -> None:
        """Read the counts after the loss is computed: an earlier read would break the graph of a compiled loss."""
        counts = [(float(count), is_trained) for count, is_trained in self.counts]
        self.items.counts += [count for count, _ in counts]
        self.items.trained += [count for count, is_trained in counts if is_trained]

    def _compares_rows(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Return whether the classes of a loss are the rows of the batch, as in CLIP, where row n has label n."""
        is_square = source.dim() == 2 and source.shape[0] == source.shape[1]
        return is_square and any(target.data_ptr() == made.data_ptr() for made in self.ranges)


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
    watch.finish()


_DROPOUTS = (functional.dropout, functional.alpha_dropout, functional.feature_alpha_dropout, functional.dropout1d,
             functional.dropout2d, functional.dropout3d)  # fmt: skip

# Functions that apply dropout, and the index of the dropout probability among their arguments.
_PLACES = {functional.scaled_dot_product_attention: 4, functional.multi_head_attention_forward: 10}


class NoDropout(TorchFunctionMode):
    """Disables dropout in the with block, since random draws for all rows and for some of the rows would differ."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:  # called, because a placeholder gets its values at the first operation
            return func(args[0] if args else kwargs["input"], 0.0, training=False)
        place = _PLACES.get(func)
        if place is not None and len(args) > place:
            args = (*args[:place], 0.0, *args[place + 1 :])
        elif place is not None and "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return self.call(func, args, kwargs)

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a torch function that is not a dropout function."""
        return func(*args, **kwargs)


class _HasState(Protocol):
    """A random generator of an accelerator."""

    def get_state(self) -> torch.Tensor:
        """Return the state."""


class SteadyDraws(NoDropout):
    """Replaces all random numbers in the with block by constants, and disables dropout.

    Integers become the numbers from n - 1 down to 0, a permutation, so functions that exchange rows still do that.
    """

    # generator: random generator of the device. Default: only the host draws.
    # types: set to which the dtypes of computed tensors are added

    def __init__(self, generator: _HasState | None = None, types: set[torch.dtype] | None = None) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set() if types is None else types
        self._generators = [torch.default_generator, *([] if generator is None else [generator])]

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a torch function, and replace its result by constants if the function drew random numbers."""
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
                if found.is_floating_point():
                    found.fill_(0.5)
                else:
                    found.copy_(torch.arange(found.numel()).flip(0).reshape(found.shape) % 2**31)
        return found
