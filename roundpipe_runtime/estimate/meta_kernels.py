"""Kernels for ``meta`` tensors that match devices: same sizes of results, and of tensors saved for backward.

::

    attention      on meta torch writes out the scores of every pair of tokens; kernels of devices do not
    grouped_mm     products of groups of rows, as experts do: on meta torch has them for bfloat16 only
    bool(tensor)   not known on meta; here True: models ask whether a mask hides nothing
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from yobx_flatten.private_names.of_torch import TorchDispatchMode

_ATEN = torch.ops.aten
_ATTENTION = functional.scaled_dot_product_attention


@contextlib.contextmanager
def device_kernels(kind: str = "cuda") -> Iterator[None]:
    """Make operations on ``meta`` behave as on devices, in this block and thread.

    >>> q = torch.empty(1, 1, 4096, 64, device="meta", requires_grad=True)
    >>> kept = []
    >>> with device_kernels(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()), lambda t: t):
    ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    >>> max(kept) == 4096 * 64
    True
    """
    # kind: the kind of the device; `"cpu"` has no kernel for attention with dropout
    with _Attention(drops=kind != "cpu"), _Operations():
        yield


class _Attention(TorchFunctionMode):
    def __init__(self, *, drops: bool) -> None:
        super().__init__()
        self.drops = drops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:  # what it calls does not come here
            with mock.patch.object(functional, "scaled_dot_product_attention", self._attend):
                return func(*args, **kwargs)
        return self._attend(*args, **kwargs) if func is _ATTENTION else func(*args, **kwargs)

    def _attend(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if query.is_meta:
            return _fused(self.drops, query, *args, **kwargs)
        return _ATTENTION(query, *args, **kwargs)


def _fused(
    drops: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    # the kernels that save memory take no others
    is_usual = query.dim() == 4 and value.shape[-1] == query.shape[-1] and key.shape[0] == query.shape[0]
    shares = key.shape[1] == query.shape[1] or enable_gqa
    is_trainable = attn_mask is not None and attn_mask.requires_grad
    if is_usual and shares and (drops or not dropout_p) and not is_trainable:
        found: torch.Tensor = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
        return found
    return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch does not annotate it
        self._results = MetaResults()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATEN._grouped_mm.default and args[0].is_meta:
            return _grouped(*args, **(kwargs or {}))
        if func is _ATEN._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        return self._results.call(func, args, kwargs or {}, func)


def _grouped(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    rows, columns = first.shape[-2], second.shape[-1]
    groups: tuple[int, ...] = ()
    if first.dim() == second.dim():  # a product for every group: two stacks of matrices, or the columns in groups
        assert first.dim() == 3 or offs is not None
        groups = (first.shape[0] if first.dim() == 3 or offs is None else offs.shape[0],)
    return first.new_empty(*groups, rows, columns, dtype=out_dtype or first.dtype)


# Compute what operations on ``meta`` return once for each form of their arguments.


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
        """Run an operation and return its result."""
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
