"""Change settings of torch and of model libraries during a trace, such as the kernel of the attention."""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..core.private_names.of_torch import DispatchKey, FakeTensor
from ..registry.patches import LOCK
from ..registry.recipe.aliases import PyTree

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_STEPS = DispatchKey.CompositeImplicitAutograd


class _PlainAttention:
    """Context manager in which traces use torch's math kernel for ``scaled_dot_product_attention``."""

    # The attention stays one operator, but a `contiguous` after it is dropped if the strides of the CPU's fused kernel
    # make it redundant. The ONNX exporter then cannot view the result ("Cannot view a tensor with shape", T5 and AFMoE
    # in torch 2.13). The fused kernel also asks whether there is one row
    # (https://github.com/pytorch/pytorch/issues/180202).
    #
    # torch stores the choice of the kernel per process, not per thread: the first of several traces sets the kernel,
    # and the last trace restores the former kernel.

    def __init__(self) -> None:
        self._holders: list[int] = []  # threads
        self._choice = contextlib.ExitStack()
        # torch 2.15 also stores the choice in a context variable, which must be restored in the context that set it: a
        # separate context, since the first and the last trace may run in different threads
        self._context = contextvars.Context()

    def __enter__(self) -> None:
        with LOCK:
            if not self._holders:
                self._context.run(self._choice.enter_context, sdpa_kernel(SDPBackend.MATH))
                if _STEPS not in _ATTENTION.py_kernels:
                    _ATTENTION.py_impl(_STEPS)(self._attention)
                    self._choice.callback(_ATTENTION._dispatch_cache.clear)
                    self._choice.callback(_ATTENTION.py_kernels.pop, _STEPS)  # runs first
            self._holders.append(threading.get_ident())

    def __exit__(self, *exception: object) -> None:
        with LOCK:
            self._holders.remove(threading.get_ident())
            if not self._holders:
                self._context.run(self._choice.close)

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
        """In a trace, return a tensor of attention's output size, without running the operators of attention."""
        # torch runs the twenty operators of the attention on fake tensors. With dynamic sizes this takes two fifths of
        # a trace of Llama. The conditions of these operators on the sizes are also checked here, so that the program
        # has the same guards. Unusual arguments, calls that need gradients, and traces that record operators run the
        # operators.
        given = [tensor for tensor in (query, key, value, attn_mask) if tensor is not None]
        is_size_alone = get_proxy_mode() is None and not torch.is_grad_enabled()
        # torch has one table of kernels for all threads
        if threading.get_ident() in self._holders and is_size_alone and _is_usual(given, is_causal, enable_gqa):
            return query.new_empty(_size(query, key, value, attn_mask))
        result: Tensor = _ATTENTION._op_dk(
            _STEPS, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return result

    def forget_others(self) -> None:
        """In a forked process, forget traces of threads that exist only in the parent process."""
        with LOCK:
            held = bool(self._holders)
            self._holders = [thread for thread in self._holders if thread == threading.get_ident()]
            if held and not self._holders:
                self._context.run(self._choice.close)


PLAIN_ATTENTION = _PlainAttention()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=PLAIN_ATTENTION.forget_others)


# torch's cache of fake tensor results helps if layers have equal shapes (without it, a trace of an encoder takes 1.6
# times as long). With keys and values each layer has its own sizes: there are few hits, an entry costs more than its
# operator, and without the cache a trace of a decoder takes two thirds of the time.
_FEW_TENSORS = 5  # inputs of an encoder: tokens, a mask, positions, types; with more, the cache is off


def fake_tensor_cache_off(count: int, *, is_dynamic: bool) -> contextlib.AbstractContextManager[None]:
    # count: the number of inputs that are tensors
    if not is_dynamic or count <= _FEW_TENSORS:
        return contextlib.nullcontext()
    # also a setting per thread; imported here because it imports all of dynamo
    from ..core.private_names.of_torch import dynamo_config

    off: contextlib.AbstractContextManager[None] = dynamo_config.patch(fake_tensor_cache_enabled=False)
    return off


def _is_usual(given: list[Tensor], is_causal: bool, enable_gqa: bool) -> bool:
    """Return whether :func:`_size` can compute the output size of attention for these arguments."""
    query, key, value, *masks = given
    if any(type(tensor) is not FakeTensor or tensor.device != query.device for tensor in given):
        return False
    if any(tensor.dim() != 4 or tensor.dtype != query.dtype for tensor in (query, key, value)):
        return False
    if any(is_causal or mask.dim() > 4 or mask.dtype not in (torch.bool, query.dtype) for mask in masks):
        return False
    heads, fewer, others = (tensor.shape[1] for tensor in (query, key, value))
    if not all(isinstance(size, int) for size in (heads, fewer, others)):
        return False
    return fewer == others and (heads % fewer == 0 if enable_gqa else heads == fewer)


def _size(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[int, ...]:
    """Return the output size of attention; check the input sizes as torch's attention operators check them."""
    heads = query.shape[1]  # also for keys and values: fewer heads are repeated
    width, length = key.shape[3], key.shape[2]
    torch._check(query.shape[3] == width, lambda: f"queries of {query.shape[3]} numbers, and keys of {width}")
    scores = (*torch.broadcast_shapes(query.shape[:2], (key.shape[0], heads)), query.shape[2], length)
    if mask is not None:
        scores = torch.broadcast_shapes(scores, mask.shape)
    torch._check(scores[3] == value.shape[2], lambda: f"{scores[3]} keys, and {value.shape[2]} values")
    return (*torch.broadcast_shapes(scores[:2], (value.shape[0], heads)), scores[2], value.shape[3])


class Translation(NamedTuple):
    operator: Any  # an operator of PyTorch
    function: Callable[..., Any]  # builds it from ONNX operators
    is_complex: bool = False  # for complex numbers, which are an additional axis of size two in ONNX
    opset: int = 18  # the first version of ONNX's operators for which it is used


class TraceSupport:
    """Interface for functions of a model library that are replaced in traces; the base class replaces nothing."""

    def __init__(self, modules: str) -> None:
        self.modules = modules

    def acquire(self) -> None:
        """Replace library functions by versions that exported programs need when they are called."""

    def release(self) -> None:
        """Restore, at the end of a ``with`` block, the library functions that :meth:`acquire` replaced."""

    def named_for(self, forward: Callable[..., Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Rename keyword arguments, or their dynamic shapes, to the parameter names of a module's ``forward``."""
        return entries

    def named_as(self, names: Collection[str], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Rename the keyword arguments of a call to the input names of an exported program."""
        return kwargs

    def prepare(self, tree: PyTree) -> PyTree:
        """Replace KV caches in example inputs by copies whose tensors' sizes and strides a trace does not fix."""
        return tree

    def traceable(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that replaces library functions by versions that can be traced."""
        return contextlib.nullcontext()

    def translations(self) -> Iterable[Translation]:
        """Return translations to ONNX for the operators that the model library defines."""
        return ()


OPEN: list[TraceSupport | None] = []
"""Tracing helpers of each library in each open ``with`` block, or ``None``; read and changed under the lock."""


def open_supports() -> list[TraceSupport]:
    with LOCK:
        return [support for support in dict.fromkeys(OPEN) if support is not None]
