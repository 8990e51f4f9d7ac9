"""Where the tensors of a training are: in memory, unless a store has another place for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from ..device.events import Event
from .parts import widened
from .torch_steps import Optimizer

# Has the tensors of a layer in memory for a block.
AtHand: TypeAlias = Callable[[int], AbstractContextManager[None]]

# Gradients on the host, and when they are complete.
Landed: TypeAlias = dict[nn.Parameter, tuple[torch.Tensor, Event]]


class HasParameters(Protocol):
    """A layer as far as its parameters are concerned."""

    @property
    def index(self) -> int:
        """The number of the layer."""

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, each once."""


class InMemory:
    """Tensors that are in memory all the time."""

    def at_hand(self, contents: Sequence[HasParameters], order: Sequence[int]) -> AtHand:
        """Return what has the parameters of a layer in memory, in a run that comes to layers in an order."""
        return _in_memory

    def updating(self, contents: Sequence[HasParameters]) -> AtHand:
        """Return what has all that a step reads and writes of a layer in memory, in the order of layers."""
        return _in_memory

    def hold_state(self, target: torch.Tensor, state: dict[str, Any]) -> None:
        """Put the state that an optimizer has of a parameter where it stays."""

    def take_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optimizer:
        """Do the step of an optimizer as a whole; return an optimizer whose step does what is left to do."""
        return widened(optimizer, args, kwargs)

    def land(self, layer: int, gradients: Landed) -> Landed:
        """Return the gradients of a layer, where they stay until the step."""
        return gradients

    def wait_landed(self) -> None:
        """Wait until gradients are where they stay; raise what went wrong."""

    def close(self) -> None:
        """Release what belongs to the place."""


def _in_memory(layer: int) -> AbstractContextManager[None]:
    return nullcontext()
