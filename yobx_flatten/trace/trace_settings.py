"""Change settings of torch during a trace: duck shapes, the cache of results, the kernel of the attention."""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..private_names.of_torch import DispatchKey, FakeTensor, fx_config, pytree
from ..registry.patches import LOCK

# The size of what the attention returns in a trace, read off its arguments.


_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


_STEPS = DispatchKey.CompositeImplicitAutograd


class AttentionSizes:
    """Inside the block, a trace computes the output size of an attention from its arguments.

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


class _PlainAttention:
    """Trace the attention with the strides of its plain kernel, those that every other kernel's callers may rely on.

    The attention stays one operator, but a ``contiguous`` after it is dropped where the CPU's fused kernel happens to
    return strides that make it needless. The ONNX exporter then cannot view the result ("Cannot view a tensor with
    shape", T5 and AFMoE in torch 2.13). The fused kernel also asks whether there is one row
    (https://github.com/pytorch/pytorch/issues/180202).

    torch keeps the choice of kernels for the process, not for a thread: the first trace makes it, and the last one puts
    back what was found. In a forked child the traces of other threads are over.
    """

    def __init__(self) -> None:
        self._holders: list[int] = []  # threads
        self._choice = contextlib.ExitStack()
        # torch 2.15 notes the choice in a context variable also, which must be put back in the context that set it:
        # one of our own, since the thread of the first trace is not always that of the last
        self._context = contextvars.Context()
        self._sizes = AttentionSizes(lambda: threading.get_ident() in self._holders)

    def __enter__(self) -> None:
        with LOCK:
            if not self._holders:
                self._context.run(self._choice.enter_context, sdpa_kernel(SDPBackend.MATH))
                self._choice.enter_context(self._sizes)
            self._holders.append(threading.get_ident())

    def __exit__(self, *exception: object) -> None:
        with LOCK:
            self._holders.remove(threading.get_ident())
            if not self._holders:
                self._context.run(self._choice.close)

    def forget_others(self) -> None:
        """End the traces of all other threads."""
        with LOCK:
            held = bool(self._holders)
            self._holders = [thread for thread in self._holders if thread == threading.get_ident()]
            if held and not self._holders:
                self._context.run(self._choice.close)


PLAIN_ATTENTION = _PlainAttention()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=PLAIN_ATTENTION.forget_others)


@contextlib.contextmanager
def duck_shapes_off() -> Iterator[None]:
    """Keep sizes apart that happen to be equal in the example."""
    # a setting per thread (a ContextVar), so it is set in the thread that traces and not where the block is entered
    found = fx_config.use_duck_shape
    fx_config.use_duck_shape = False
    try:
        yield
    finally:
        fx_config.use_duck_shape = found


FEW_TENSORS = 5  # of an encoder: tokens, a mask, positions, types


def sizes_differ(*trees: Any) -> bool:
    """Return whether torch's cache of operator results slows a trace down.

    It finds results again where layers have equal shapes (an encoder: without it, a trace takes 1.6 times as long).
    With keys and values each layer has its own sizes: few results are found, an entry costs more than its operator, and
    a decoder is traced in two thirds of the time without it.
    """
    return sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(trees)) > FEW_TENSORS


@contextlib.contextmanager
def fake_tensor_cache_off() -> Iterator[None]:
    """Clear torch's cache of operator results for other tensors."""
    # Also a setting per thread; imported here because it brings all of dynamo.
    from ..private_names.of_torch import dynamo_config

    found = dynamo_config.fake_tensor_cache_enabled
    dynamo_config.fake_tensor_cache_enabled = False
    try:
        yield
    finally:
        dynamo_config.fake_tensor_cache_enabled = found


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
    """Return the output size, after the checks that the attention operators make, in their order."""
    heads = query.shape[1]  # also of keys and values: each is repeated if they have fewer
    width, length = key.shape[3], key.shape[2]
    torch._check(query.shape[3] == width, lambda: f"queries of {query.shape[3]} numbers, and keys of {width}")
    scores = (*torch.broadcast_shapes(query.shape[:2], (key.shape[0], heads)), query.shape[2], length)
    if mask is not None:
        scores = torch.broadcast_shapes(scores, mask.shape)
    torch._check(scores[3] == value.shape[2], lambda: f"{scores[3]} keys, and {value.shape[2]} values")
    return (*torch.broadcast_shapes(scores[:2], (value.shape[0], heads)), scores[2], value.shape[3])
