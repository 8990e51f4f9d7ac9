"""Placeholders for tensors that are not computed yet: they can be passed on, but not computed with.

While the forward of a model is recorded, its layers do not run, and placeholders stand for their outputs. A model that
passes them from layer to layer runs through. A model that computes with one has its own code between two layers: the
first operation on a placeholder leaves the forward by `NeedsValue`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from yobx_flatten.private_names.of_torch import DisableTorchFunctionSubclass, TensorBase, make_wrapper_subclass


class Key(NamedTuple):
    """Name of a tensor: output ``leaf`` of call ``call``; tensors that phase p computed have the call ``-1 - p``."""

    call: int
    leaf: int


class NeedsValue(BaseException):
    """The forward cannot continue without the value of a placeholder. Models catch `Exception`, so it is none."""

    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.key = key


# What a placeholder with a known form answers.
_FORM = {
    *(vars(TensorBase)[name].__get__ for name in ("shape", "dtype", "device", "ndim")),
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.is_floating_point,
    torch.Tensor.__len__,
}
# What makes a tensor with the form, or the dtype and device, of another one.
_OF_FORM = {
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
    *(torch.Tensor.new_empty, torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full),
    torch.Tensor.new_tensor,
}
_ALWAYS = {torch.Tensor.__repr__, torch.Tensor.__hash__, torch.Tensor.__format__}


class Placeholder(torch.Tensor):
    """A stand-in for a tensor that is not computed yet."""

    # like: tensor of the same shape, dtype and device; `None` if these are not known

    key: Key  # name of the tensor
    has_form: bool  # whether shape, dtype and device are known

    @staticmethod
    def __new__(cls, key: Key, like: torch.Tensor | None) -> Placeholder:
        """Make a placeholder, which takes no memory."""
        known = like is not None and not (isinstance(like, Placeholder) and not like.has_form)
        with DisableTorchFunctionSubclass():
            form = like if known and like is not None else torch.empty(0)
            made: Placeholder = make_wrapper_subclass(
                cls, form.shape, dtype=form.dtype, device=form.device, requires_grad=False
            )
        made.key = key
        made.has_form = known
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # mypy loses its default
        return f"Placeholder({self.key})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions about a known form; leave the forward for everything else."""
        found = _first([*args, *(kwargs or {}).values()])
        if found is None or func in _ALWAYS or (found.has_form and func in _FORM):
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if found.has_form and func in _OF_FORM and args[0] is found:
            with DisableTorchFunctionSubclass():
                form = torch.empty((), dtype=found.dtype, device=found.device).expand(found.shape)
            return func(form, *args[1:], **(kwargs or {}))
        raise NeedsValue(found.key)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch annotates it as no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Leave the forward: an operator reads the value, called by code that torch functions do not cover."""
        found = _first([*args, *(kwargs or {}).values()])
        raise NeedsValue(found.key if found is not None else Key(-1, -1))


def _first(values: Any) -> Placeholder | None:
    for value in values:
        if isinstance(value, Placeholder):
            return value
        if isinstance(value, (list, tuple)) and (inner := _first(value)) is not None:
            return inner
    return None


def holds_placeholder(leaves: Any) -> Placeholder | None:
    """Return the first placeholder among leaves."""
    return _first(leaves)
