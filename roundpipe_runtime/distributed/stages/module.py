"""Wrap a module for ``torch.distributed.pipelining``, whose stages pass tensors only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from yobx_flatten.private_names.of_torch import pytree

from ...batch.splitting import Microbatch
from .boundaries import Boundary


class StageModule(nn.Module):
    """Call a module with objects that are rebuilt from tensors, and return the tensors of its output."""

    # module: module of the stage, a `RoundPipe` for example
    # received: what the stage before returns; `None` for the first stage
    # returned: what this stage returns; `None` for the last stage, whose only result is the loss
    # loss_fn: loss of the last stage's output for a microbatch; `None` where none is asked for
    # outputs: output of the last stage by microbatch, detached; `None` where they are not asked for

    def __init__(self, module: nn.Module, stage: int, received: Boundary | None, returned: Boundary | None) -> None:
        super().__init__()
        self.module = module
        self.stage = stage
        self.received = received
        self.returned = returned
        self.calls: Sequence[Microbatch] = ()
        self.loss_fn: Callable[[Any, Microbatch], torch.Tensor] | None = None
        self.outputs: list[Any] | None = None

    def forward(self, *tensors: torch.Tensor, microbatch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run a microbatch."""
        # tensors: what arrived from the stage before; nothing for the first stage
        # microbatch: number of the microbatch, as a tensor, which torch hands to each stage in its part
        number = int(microbatch)
        call = self.calls[number]
        value = self.module(*arguments(self.received, tensors, call.args), **call.kwargs)
        if self.returned is not None:
            what = f"The output of stage {self.stage} for microbatch {number}"
            return tuple(self.returned.check(value, what=what, with_gradients=torch.is_grad_enabled()))
        if self.outputs is not None:
            self.outputs.append(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value))
        return (torch.zeros(()) if self.loss_fn is None else self.loss_fn(value, call),)


def arguments(received: Boundary | None, tensors: tuple[torch.Tensor, ...], own: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the positional arguments of a stage: the caller's for the first one, else what arrived.

    A tuple arrives as several arguments, anything else as one.
    """
    if received is None:
        return own
    value = received.structure.rebuild(tensors)
    return value if type(value) is tuple else (value,)
