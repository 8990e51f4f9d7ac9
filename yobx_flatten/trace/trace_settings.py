"""Change settings of torch during a trace: duck shapes, the cache of results, the kernel of the attention."""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..private_names.of_torch import fx_config, pytree
from ..registry.locking import LOCK
from .attention_sizes import AttentionSizes


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
    """Return whether torch's cache of what operators return is a loss.

    It finds results again where layers have equal shapes (an encoder: without it, a trace takes 1.6 times as long).
    With keys and values each layer has its own sizes: few results are found, an entry costs more than its operator, and
    a decoder is traced in two thirds of the time without it.
    """
    return sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(trees)) > FEW_TENSORS


@contextlib.contextmanager
def fake_tensor_cache_off() -> Iterator[None]:
    """Let torch forget what operators returned for other tensors."""
    # Also a setting per thread; imported here because it brings all of dynamo.
    from ..private_names.of_torch import dynamo_config

    found = dynamo_config.fake_tensor_cache_enabled
    dynamo_config.fake_tensor_cache_enabled = False
    try:
        yield
    finally:
        dynamo_config.fake_tensor_cache_enabled = found
