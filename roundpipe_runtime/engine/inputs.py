"""What goes into a run, as values on the host, and what goes back out of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..device.transfer import HostValue, separate
from .run import Run

__all__ = ["feed_inputs", "host_value"]


def host_value(leaves: Sequence[Any], spec: pytree.TreeSpec, *, requires_grad: bool, what: str) -> HostValue:
    """Return leaves of a microbatch as a value on the host.

    Args:
        leaves: leaves of the value.
        spec: structure of the value.
        requires_grad: whether gradients flow back through tensors that require one.
        what: name of the value in an error.

    Returns:
        The value; it is complete, also where the caller computed it on an accelerator.

    Raises:
        UnregisteredObjectError: a leaf holds tensors, and no flattening function is registered for its class.
    """
    structure, tensors = separate(leaves, spec, what=what)
    tensors = [_on_host(tensor) for tensor in tensors]
    flags = [requires_grad and tensor.requires_grad for tensor in tensors]
    return HostValue(structure, tensors, flags, [None] * len(tensors))


def feed_inputs(run: Run, host_values: Sequence[HostValue]) -> None:
    """Continue backward from the inputs if they are part of a graph, such as that of another pipeline.

    Args:
        run: run that has gone backward.
        host_values: inputs of each microbatch.
    """
    scale = run.contract.gradient_scale()
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


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for what the caller computed on an accelerator, on a stream that no device of ours knows."""
    return tensor if tensor.device.type in ("cpu", "meta") else tensor.cpu()
