"""Layers and optimizers that wait for fixed times instead of computing, so that other processes cost them little."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

__all__ = ["WaitingLayer", "WaitingSGD"]


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return inputs + weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return gradient, gradient.sum(0), None


class WaitingLayer(nn.Module):
    """A layer that takes a fixed time.

    Args:
        seconds: seconds of a forward; a backward takes twice as long.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Wait.apply(inputs, self.weight, self.seconds)
        return found


class WaitingSGD(torch.optim.SGD):
    """Takes a fixed time for each parameter: ``seconds``."""

    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.seconds * sum(p.grad is not None for group in self.param_groups for p in group["params"]))
        return super().step(closure)
