"""Lazy logits: logits that are not computed if only their loss is needed.

The head of the model returns a `LazyLogits`: a tensor with a shape and no memory, which records elementwise operations
(a scale, a soft cap, a wider dtype) and selections of rows. The `cross_entropy` of a `LazyLogits` is computed in
chunks. Operations other than elementwise operations, row selections and `cross_entropy` compute the logits first. Code
that writes into logits, or calls operators instead of torch functions, raises `NotLazy`, and the forward is repeated
without lazy logits. The loss is the same with and without lazy logits.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from yobx_flatten.core.private_names.of_torch import (
    DisableTorchFunctionSubclass,
    TensorBase,
    make_wrapper_subclass,
    pytree,
)
from yobx_flatten.registry.recipe.aliases import Kwargs, PyTree

from ...engine.parameters.host_table import HostTable, on_tables
from ..adapters import model_inside
from .sliced import chunked_cross_entropy, sliced_cross_entropy

on_tables(chunked_cross_entropy)(sliced_cross_entropy)

_SMALL = 2**24  # logits with at most this many values (64 MB in float32) are computed by the model

# Queries about a tensor that need no values.
QUERIES_OF_FORM = {
    *(vars(TensorBase)[name].__get__ for name in ("shape", "dtype", "device", "ndim")),
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.is_floating_point,
    torch.Tensor.__repr__,
    torch.Tensor.__hash__,
}
_POINTWISE = {torch.Tensor.float, torch.tanh, torch.Tensor.tanh}
_WITH_NUMBER = {
    *(torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__),
    *(torch.div, torch.Tensor.div, torch.Tensor.__truediv__),
}
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow", "and", "or", "xor", "mod")}
_RESHAPING = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape}


class NotLazy(BaseException):
    """Raised when a forward needs the values of its logits. A `BaseException`, because models catch `Exception`."""


class LazyLogits(torch.Tensor):
    """Placeholder for logits of an LM head, ``steps(linear(hidden, *head))``, computed only if values are needed."""

    hidden: torch.Tensor
    head: tuple[torch.Tensor, torch.Tensor | None]
    steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    # computed values of these logits and of the logits that they derive from, with their versions
    computed: list[tuple[torch.Tensor, int]]

    @staticmethod
    def __new__(
        cls,
        hidden: torch.Tensor,
        head: tuple[torch.Tensor, torch.Tensor | None],
        steps: Sequence[Callable[[torch.Tensor], torch.Tensor]] = (),
        computed: list[tuple[torch.Tensor, int]] | None = None,
    ) -> LazyLogits:
        with torch.no_grad():  # an empty product has the right dtype, also under autocast
            probe = _done(functional.linear(hidden.reshape(-1, hidden.shape[-1])[:0], *head), steps)
        shape = (*hidden.shape[:-1], head[0].shape[0])
        made: LazyLogits = make_wrapper_subclass(
            cls, shape, dtype=probe.dtype, device=hidden.device, requires_grad=False
        )
        made.hidden, made.head, made.steps = hidden, head, tuple(steps)
        made.computed = [] if computed is None else computed
        return made

    def then(self, step: Callable[[torch.Tensor], torch.Tensor]) -> LazyLogits:
        return LazyLogits(self.hidden, self.head, (*self.steps, step), self.computed)

    def of(self, hidden: torch.Tensor) -> LazyLogits:
        return LazyLogits(hidden, self.head, self.steps, self.computed)

    def check_unwritten(self) -> None:
        """Raise an error if code wrote in place to logits after their values had been computed."""
        if any(values._version != version for values, version in self.computed):
            raise NotLazy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # mypy loses its default
        return f"LazyLogits({tuple(self.shape)})"

    def compute(self) -> torch.Tensor:
        self.check_unwritten()
        values = _done(functional.linear(self.hidden, *self.head), self.steps)
        self.computed.append((values, values._version))
        return values

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_in_place = name.endswith("_") and not name.endswith("__")
        if is_in_place or name == "__set__" or name == "__setitem__" or name in _IN_PLACE or "out" in kwargs:
            raise NotLazy
        if func in QUERIES_OF_FORM:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (found := _lazy(func, args, kwargs)) is not None:
            return found
        args, kwargs = pytree.tree_map_only(LazyLogits, LazyLogits.compute, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch annotates it as no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise `NotLazy`: autograd does not record an ATen operator that is called without ``__torch_function__``."""
        raise NotLazy


def _done(values: torch.Tensor, steps: Sequence[Callable[[torch.Tensor], torch.Tensor]]) -> torch.Tensor:
    for step in steps:
        values = step(values)
    return values


def _lazy(func: Any, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Run an operation on lazy logits without computing the logits; return ``None`` if this is not possible."""
    if func is functional.cross_entropy:
        return _loss(*args, **kwargs)
    logits = next((arg for arg in args if isinstance(arg, LazyLogits)), None)
    if logits is None or kwargs:
        return None
    if func is torch.Tensor.contiguous and len(args) == 1:
        return logits
    if func in _POINTWISE and len(args) == 1:
        return logits.then(func)
    if func is torch.Tensor.to and len(args) == 2 and isinstance(args[1], torch.dtype):
        dtype = args[1]
        return logits.then(lambda values: values.to(dtype))
    if func in _WITH_NUMBER and len(args) == 2 and args[0] is logits:
        number = args[1]
        is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
        return logits.then(lambda values: func(values, number)) if is_number else None
    if func in _RESHAPING and args[0] is logits:
        sizes = args[1:] if isinstance(args[1], int) else tuple(args[1])
        if not sizes or sizes[-1] != logits.head[0].shape[0] or any(type(size) is not int for size in sizes):
            return None
        return logits.of(logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1]))
    if func is torch.Tensor.__getitem__ and args[0] is logits:
        return _rows(logits, args[1])
    return None


def _rows(logits: LazyLogits, index: Any) -> LazyLogits | None:
    """Select rows of lazy logits by slices; return ``None`` if the index is not supported."""
    index = index if isinstance(index, tuple) else (index,)
    whole = slice(None)
    if not all(isinstance(one, slice) or one is Ellipsis for one in index) or index.count(Ellipsis) > 1:
        return None
    named = len(index) - (Ellipsis in index)
    reaches_last = named == logits.hidden.dim() or (index[-1] is not Ellipsis and Ellipsis in index)
    if reaches_last and index[-1] != whole:
        return None
    return logits.of(logits.hidden[index])


def _loss(
    source: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    others = (weight, size_average, reduce)
    if not isinstance(source, LazyLogits) or any(other is not None for other in others):
        return None
    if reduction not in ("mean", "sum") or source.dim() != 2 or target.is_floating_point():
        return None
    # the chunked loss has at least 32 bits, but the model's loss has the dtype of the logits
    if source.dtype not in (torch.float32, torch.float64):
        return None
    source.check_unwritten()
    steps = source.steps
    return chunked_cross_entropy(
        source.hidden,
        source.head[0],
        target,
        bias=source.head[1],
        transform=(lambda values: _done(values, steps)) if steps else None,
        reduction=reduction,  # type: ignore[arg-type] # checked above
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )


class _Head(TorchFunctionMode):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear and len(args) > 1 and args[1] is self.weight and type(args[0]) is torch.Tensor:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            if isinstance(self.weight, HostTable) or args[0].shape[:-1].numel() * self.weight.shape[0] > _SMALL:
                return LazyLogits(args[0], (self.weight, bias))
        return func(*args, **kwargs)


def weight_of_head(model: nn.Module) -> torch.Tensor | None:
    find = getattr(model_inside(model), "get_output_embeddings", None)
    weight = None if find is None else getattr(find(), "weight", None)
    return weight if isinstance(weight, torch.Tensor) else None


def loss_only(model: nn.Module, run: Callable[[], Any]) -> PyTree:
    """Run a forward of which only the loss is used, without computing all logits at once."""
    # run: function that runs the forward, which is called again if the forward needs its logits
    weight = weight_of_head(model)
    try:
        with contextlib.nullcontext() if weight is None else _Head(weight):
            output = run()
            return pytree.tree_map_only(LazyLogits, lambda _: None, output)
    except NotLazy:
        return run()


def without_logits(model: nn.Module, output: PyTree) -> PyTree:
    """Return the output of a model with ``None`` instead of the logits over the vocabulary."""
    # logits of few rows are computed, and the outputs of all microbatches must have the same structure
    if (weight := weight_of_head(model)) is None:
        return output
    classes = weight.shape[0]

    def is_logits(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[-1] == classes

    if isinstance(output, dict):  # as outputs of transformers are
        for name in [name for name, value in output.items() if name.endswith("logits") and is_logits(value)]:
            output[name] = None
        return output
    return tuple(None if is_logits(value) else value for value in output) if type(output) is tuple else output
