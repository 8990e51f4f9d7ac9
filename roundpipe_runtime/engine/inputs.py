"""Move the inputs of a run to the host, and pass the gradients of inputs back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from yobx_flatten.private_names.of_torch import pytree

from ..device.transfer import HostValue, separate
from .run import Run

# Tensors of a batch and their copies in pinned memory, by the identity of the tensor.
PinnedCopies: TypeAlias = dict[int, tuple[torch.Tensor, torch.Tensor]]


def host_value(
    leaves: Sequence[Any],
    spec: pytree.TreeSpec,
    *,
    requires_grad: bool,
    what: str,
    pinned: PinnedCopies | None = None,
) -> HostValue:
    """Return leaves of a microbatch as a value on the host."""
    # pinned: copies of tensors that microbatches share, to which those of this one are added. Default: nothing is
    # pinned.
    # returns: the value; it is complete, also where the caller computed it on an accelerator
    structure, tensors = separate(leaves, spec, what=what)
    tensors = [_on_host(tensor) for tensor in tensors]
    flags = [requires_grad and tensor.requires_grad for tensor in tensors]
    if pinned is not None:
        # A copy from pageable memory holds the thread that launches the next microbatches.
        tensors = [t if flag else _pinned(t, pinned) for t, flag in zip(tensors, flags, strict=True)]
    return HostValue(structure, tensors, flags, [None] * len(tensors))


def feed_inputs(run: Run, host_values: Sequence[HostValue], scale: float) -> None:
    """Continue backward from the inputs if they are part of a graph, such as that of another pipeline."""
    # scale: factor for their gradients, known when all losses of the batch are
    tensors, gradients = [], []
    for number, on_host in enumerate(host_values):
        for tensor, copy in zip(on_host.tensors, run.collected.input_gradients.get(number, []), strict=False):
            if copy is not None and tensor.requires_grad:
                gradient, ready = copy
                ready.result()
                tensors.append(tensor)
                gradients.append(gradient.mul_(scale) if scale != 1.0 else gradient)
    if tensors:
        torch.autograd.backward(tensors, gradients)


def _pinned(tensor: torch.Tensor, pinned: PinnedCopies) -> torch.Tensor:
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not is_plain or tensor.is_pinned():
        return tensor
    if id(tensor) not in pinned:
        pinned[id(tensor)] = tensor, tensor.detach().pin_memory()
    return pinned[id(tensor)][1]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for what the caller computed on an accelerator, on a stream that no device of ours knows."""
    return tensor if tensor.device.type in ("cpu", "meta") else tensor.cpu()
