"""The size of what the attention returns in a trace, read off its arguments."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..private_names.of_torch import DispatchKey, FakeTensor

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_STEPS = DispatchKey.CompositeImplicitAutograd


class AttentionSizes:
    """While it is on, a trace reads the size of what an attention returns off its arguments.

    torch finds it out by running the twenty operators that the attention consists of on tensors without values. With
    sizes that vary this takes two fifths of a trace of Llama. What these operators ask of the sizes is also asked here,
    so that the program states the same conditions. What is unusual, and what needs gradients, takes the operators.
    """

    def __init__(self, in_trace: Callable[[], bool]) -> None:
        # in_trace: whether the calling thread is one that traces; torch has one table of kernels for all threads
        self._in_trace = in_trace

    def __enter__(self) -> None:
        self._is_ours = _STEPS not in _ATTENTION.py_kernels
        if self._is_ours:
            _ATTENTION.py_impl(_STEPS)(self._attention)

    def __exit__(self, *exception: object) -> None:
        if self._is_ours:
            del _ATTENTION.py_kernels[_STEPS]
            _ATTENTION._dispatch_cache.clear()

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        given = [tensor for tensor in (query, key, value, attn_mask) if tensor is not None]
        # a trace that records what is called here wants the operators themselves
        is_size_alone = get_proxy_mode() is None and not torch.is_grad_enabled()
        if self._in_trace() and is_size_alone and _is_usual(given, is_causal, enable_gqa):
            return query.new_empty(_size(query, key, value, attn_mask))
        result: Tensor = _ATTENTION._op_dk(
            _STEPS, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return result


def _is_usual(given: list[Tensor], is_causal: bool, enable_gqa: bool) -> bool:
    """Return whether the size of the result follows from the sizes, and torch would not refuse the arguments."""
    query, key, value, *masks = given
    if any(type(tensor) is not FakeTensor or tensor.device != query.device for tensor in given):
        return False
    if any(tensor.dim() != 4 for tensor in (query, key, value)) or any(mask.dim() > 4 for mask in masks):
        return False
    if query.dtype != key.dtype or query.dtype != value.dtype or (masks and is_causal):
        return False
    if any(mask.dtype not in (torch.bool, query.dtype) for mask in masks):
        return False
    heads, fewer, others = (tensor.shape[1] for tensor in (query, key, value))
    if not all(isinstance(size, int) for size in (heads, fewer, others)):
        return False
    return fewer == others and (heads % fewer == 0 if enable_gqa else heads == fewer)


def _size(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[int, ...]:
    """The size of what comes out, under the conditions that the operators of the attention state, in their order."""
    heads = query.shape[1]  # also of keys and values: each is repeated if they have fewer
    width, length = key.shape[3], key.shape[2]
    torch._check(query.shape[3] == width, lambda: f"queries of {query.shape[3]} numbers, and keys of {width}")
    scores = (*torch.broadcast_shapes(query.shape[:2], (key.shape[0], heads)), query.shape[2], length)
    if mask is not None:
        scores = torch.broadcast_shapes(scores, mask.shape)
    torch._check(scores[3] == value.shape[2], lambda: f"{scores[3]} keys, and {value.shape[2]} values")
    return (*torch.broadcast_shapes(scores[:2], (value.shape[0], heads)), scores[2], value.shape[3])
