"""Compute what operations on ``meta`` return once for each form of their arguments.

Torch works out sizes and strides of most results in Python, which takes longer than the rest of a call. The layers of a
model are alike, so they ask for the same results again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn


class MetaResults:
    """Results by operation, and by sizes, strides and dtypes of its tensors and all other arguments.

    Only operations of torch that return one new tensor are kept: no views, and none that write.

    >>> results = MetaResults()
    >>> one, two = torch.empty(2, 3, device="meta"), torch.empty(3, 5, device="meta")
    >>> results.call(torch.ops.aten.mm.default, (one, two), {}, torch.mm).shape
    torch.Size([2, 5])
    >>> results.call(torch.ops.aten.mm.default, (one, two), {}, None).shape
    torch.Size([2, 5])
    """

    def __init__(self) -> None:
        self._makes_new: dict[Any, bool] = {}
        self._known: dict[Hashable, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], compute: Callable[..., Any]) -> Any:
        """Return what an operation returns."""
        # compute: function that runs the operation on these arguments, called where the result is not known
        makes_new = self._makes_new.get(func)
        if makes_new is None:
            makes_new = self._makes_new[func] = _makes_new(func)
        if not makes_new:
            return compute(*args, **kwargs)
        try:
            key = (func, *map(_form, args), *((name, _form(value)) for name, value in kwargs.items()))
            known = self._known.get(key)
        except TypeError:  # an argument that has no hash, or a tensor that is not an ordinary one on meta
            return compute(*args, **kwargs)
        if known is not None:
            size, stride, dtype = known
            return torch.empty_strided(size, stride, dtype=dtype, device="meta")
        out = compute(*args, **kwargs)
        if _is_new(out, [*args, *kwargs.values()]):
            self._known[key] = (out.shape, out.stride(), out.dtype)
        return out


def _makes_new(func: Any) -> bool:
    """Whether an operation of torch returns one tensor, which by its schema shares no memory with an argument."""
    schema = func._schema
    return (
        schema.name.startswith("aten::")
        and len(schema.returns) == 1
        and isinstance(schema.returns[0].type, torch.TensorType)
        and all(value.alias_info is None for value in (*schema.arguments, *schema.returns))
    )


def _form(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        if not (type(value) in (torch.Tensor, nn.Parameter) and value.is_meta and value.layout == torch.strided):
            raise TypeError
        if value.dtype.is_complex:  # it may stand for its conjugate
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_form, value))
    return type(value), value  # 1 and 1.0 are equal, and promote to different dtypes


def _is_new(out: torch.Tensor, given: Sequence[Any]) -> bool:
    """Whether a tensor is all of its own memory."""
    if not (type(out) is torch.Tensor and out.is_meta and out.layout == torch.strided) or out.dtype.is_complex:
        return False
    storage = out.untyped_storage()
    alike = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta")
    return (
        out.storage_offset() == 0
        and storage.nbytes() == alike.untyped_storage().nbytes()
        and all(storage._cdata != tensor.untyped_storage()._cdata for tensor in _tensors(given))
    )


def _tensors(given: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in given:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
