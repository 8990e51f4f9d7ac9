"""Digest the gradients of a model as they are computed, so that no two parameters have one at the same time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import nn

from ...optim.parameters import is_watched, scan
from .digest import Digest, digest

# Gradients of a model of at most so many bytes are kept whole; of a larger one, those of at most so many numbers.
_SMALL = 2**26
_WHOLE = 2**10


class Gradients:
    """Digests of the gradients of a model."""

    # digests: Digest of each gradient by the name of the parameter

    def __init__(self, model: nn.Module) -> None:
        self.digests: dict[str, Digest] = {}
        self.is_small = sum(p.nbytes for p in model.parameters()) <= _SMALL
        self.watched = {id(parameter) for parameter in model.parameters() if is_watched(parameter)}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Digest a gradient of a parameter, or a summand of it."""
        name, found = self._names[id(parameter)], digest(gradient, whole=None if self.is_small else _WHOLE)
        before = self.digests.get(name)
        self.digests[name] = found if before is None else before + found

    def offer(self, parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
        """Digest a summand of a gradient, unless hooks of the parameter need the sum."""
        if id(parameter) in self.watched:
            return False
        self.add(parameter, gradient)
        return True


@contextlib.contextmanager
def own_gradients(model: nn.Module) -> Iterator[Gradients]:
    """Replace the gradients of a model in the block, and digest those that are computed in it."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    found = Gradients(model)
    with contextlib.ExitStack() as stack:
        try:
            for parameter, _ in before:
                parameter.grad = None
                stack.enter_context(_collecting(found, parameter, parameter))
            yield found
            for parameter, _ in before:
                _collect(found, parameter, parameter)  # gradients that were assigned without autograd
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient


@contextlib.contextmanager
def untied(model: nn.Module, found: Gradients) -> Iterator[None]:
    """Untie large parameters in the block: each place gets a parameter of its own, over the same memory.

    Autograd sums the gradients of an embedding and of the head that is tied to it, which takes three more tensors of
    that size. Digests are summed instead.
    """
    seen: set[int] = set()
    with contextlib.ExitStack() as stack:
        for slot in () if found.is_small else scan([model])[0].slots:
            parameter = slot.parameter
            if id(parameter) in seen and parameter.requires_grad and id(parameter) not in found.watched:
                place = nn.Parameter(parameter.detach())
                place.__class__ = type(parameter)
                place.__dict__.update(parameter.__dict__)
                stack.enter_context(_collecting(found, parameter, place))
                stack.callback(slot.owner._parameters.__setitem__, slot.name, parameter)
                slot.owner._parameters[slot.name] = place
            seen.add(id(parameter))
        yield


@contextlib.contextmanager
def _collecting(found: Gradients, parameter: nn.Parameter, place: nn.Parameter) -> Iterator[None]:
    """Digest the gradients that autograd accumulates in the stand-in of a parameter."""
    if not (place.requires_grad and place.is_leaf):
        yield
        return
    handle = place.register_post_accumulate_grad_hook(functools.partial(_collect, found, parameter))
    try:
        yield
    finally:
        handle.remove()


def _collect(found: Gradients, parameter: nn.Parameter, place: torch.Tensor) -> None:
    if place.grad is not None:
        found.add(parameter, place.grad)
        place.grad = None
