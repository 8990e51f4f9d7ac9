"""Where the tensors of a training are: in memory, unless a store has another place for them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from yobx_flatten.private_names.of_torch import is_traceable_wrapper_subclass

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
        """Return an object that loads the parameters of each layer into memory, in the order of a run."""
        return _in_memory

    def updating(self, contents: Sequence[HasParameters]) -> AtHand:
        """Return an object that loads the tensors of a layer's optimizer step into memory, in layer order."""
        return _in_memory

    def hold_state(self, target: torch.Tensor, state: dict[str, Any]) -> None:
        """Put the state that an optimizer has of a parameter where it stays."""

    def take_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optimizer:
        """Step all parameters that this place handles; return an optimizer whose step does the rest."""
        return widened(optimizer, args, kwargs)

    def land(self, layer: int, gradients: Landed) -> Landed:
        """Return the gradients of a layer, where they stay until the step."""
        return gradients

    def wait_landed(self) -> None:
        """Wait until gradients are where they stay; raise what went wrong."""

    def begin_run(self, contents: Sequence[HasParameters]) -> None:
        """Check that the gradients of a run can land, before it begins."""

    def note_failed(self, error: BaseException) -> None:
        """Note that a run has failed, of which gradients may have landed."""

    def end_run(self) -> None:
        """Note that all of a run has reached the model."""

    def check_whole(self) -> None:
        """Check that no run has failed when it had stepped some of the layers."""

    def close(self) -> None:
        """Release what belongs to the place."""


def _in_memory(layer: int) -> AbstractContextManager[None]:
    return nullcontext()


# A mark of a tensor shows later whether it was written, also by way of ``tensor.data``, which torch does not count.


# Numbers of a tensor that are compared.
_SAMPLE = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """The state of a tensor at one moment, to see later whether it changed.

    >>> tensor = torch.zeros(100)
    >>> mark = Mark.of(tensor)
    >>> tensor.data.fill_(1).sum().item(), mark.is_counted(tensor), mark.has_numbers(tensor)
    (100.0, False, False)
    """

    source: weakref.ref[torch.Tensor]
    version: int
    address: int
    sample: torch.Tensor | None  # some numbers, as bytes; `None` where they are not compared

    @classmethod
    def of(cls, tensor: torch.Tensor, *, with_numbers: bool = True) -> Mark:
        """Return the current mark (version and place) of a tensor."""
        if not is_plain(tensor):
            return cls(weakref.ref(tensor), tensor._version, 0, None)
        return cls(weakref.ref(tensor), tensor._version, tensor.data_ptr(), _sample(tensor) if with_numbers else None)

    def is_counted(self, tensor: torch.Tensor) -> bool:
        """Report whether this is another tensor, or torch has counted a write of it."""
        return self.source() is not tensor or self.version != tensor._version

    def has_numbers(self, tensor: torch.Tensor) -> bool:
        """Report whether some of its numbers, spread over the tensor, are the same."""
        return self.sample is None or torch.equal(self.sample, _sample(tensor))


def is_plain(tensor: torch.Tensor) -> bool:
    """Report whether torch counts the writes of a tensor; it does not for tensors that consist of others."""
    is_itself = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)
    return is_itself and not tensor.is_inference()  # such a tensor has no version


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat, size = tensor.detach(), int(tensor.numel())
    if not flat.is_contiguous():
        held = flat.untyped_storage().nbytes() // flat.element_size() - int(flat.storage_offset())
        size = min(size, held)
    step = max(1, size // _SAMPLE)
    return flat.as_strided((min(_SAMPLE, size // step),), (step,)).clone().view(torch.uint8)
