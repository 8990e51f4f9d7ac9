"""Compare a cut model with the reference model on a small batch: outputs and every gradient."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from yobx_flatten import leaves
from yobx_flatten.core.compare import tolerance
from yobx_flatten.recipe.aliases import Kwargs, PyTree

from ...device.protocol import Event
from ...device.virtual import VirtualDevice
from ...engine.config import RoundPipeRunConfig
from ...engine.driver import Engine
from ...optim.copyable import has_few_bits, weights_kept
from ...optim.parameters import is_watched, scan
from ..errors import CutError
from .digest import Digest, digest, distance, typical
from .report import Equivalence


def check_equivalence(
    model: nn.Module, pieces: Sequence[nn.Module], args: tuple[Any, ...], kwargs: Kwargs
) -> Equivalence:
    """Compare the pieces, run by the engine on one device, with the model.

    It takes memory for the gradients of one piece: those of the reference model are digested as they are computed,
    those of the cut model after each piece, and parameters are not copied. Gradients of the model stay as they are.
    """
    with own_gradients(model) as plain, untied(model, plain), torch.enable_grad():
        outputs = model(*args, **kwargs)
        expected = objective(outputs, None)
        torch.autograd.backward(expected)
    config = RoundPipeRunConfig(
        num_microbatch=1, requires_grad=True, preserve_rng_state=False, split_input=_uncut
    ).resolved(1)
    with engine_on_host(model, pieces) as engine, own_gradients(model) as found, torch.enable_grad():
        engine.take_gradient = found.offer
        loss, cut = engine.forward_backward(args, kwargs, None, objective, True, config)
    there, here = _tensors(cut), _tensors(outputs)
    pairs = [*((there.get(path), here.get(path)) for path in {**there, **here}), (loss, expected)]
    worst_output = max((_distance(one, other) for one, other in pairs), default=0.0)
    least = 0.1 * max(map(typical, plain.digests.values()), default=0.0)
    worst, name = 0.0, ""
    for key in sorted({*plain.digests, *found.digests}):
        apart = distance(found.digests.get(key), plain.digests.get(key), least)
        if apart > worst:
            worst, name = apart, key
    result = Equivalence(worst_output, worst, name, len(plain.digests))
    limit, of_gradients = (tolerance(kind, *(p.dtype for p in model.parameters())) for kind in ("layers", "gradients"))
    if not (worst_output <= limit and worst <= of_gradients):
        raise CutError(
            "values",
            f"cut, outputs differ by {worst_output:.1e} and gradients by {worst:.1e} ({name or 'none'}); at most "
            f"{limit:.0e} and {of_gradients:.0e} are rounding",
        )
    return result


@contextlib.contextmanager
def engine_on_host(model: nn.Module, pieces: Sequence[nn.Module]) -> Iterator[Engine]:
    """Return an engine that runs pieces on the host, one after the other, without copies of parameters."""
    engine = Engine(model, pieces, [_Host("check")], None, "check")
    try:
        yield engine
    finally:
        engine.close()


class _Host(VirtualDevice):
    """A device without copies of parameters, since pieces run on it one after the other."""

    def copy_in(self, tensor: torch.Tensor, ready: Event | None = None, *, parameter: bool = False) -> torch.Tensor:
        return tensor if parameter else super().copy_in(tensor, ready)


def _uncut(args: Any, kwargs: Any, num_microbatch: int) -> tuple[list[Any], list[Any]]:
    return [args], [kwargs]


def objective(outputs: PyTree, labels: Any) -> torch.Tensor:
    """Return a loss that depends on every number in the outputs, so that every gradient is compared."""
    total: torch.Tensor | None = None
    for tensor in _tensors(outputs).values():
        if tensor.requires_grad:
            weights = torch.linspace(0.5, 1.5, tensor.numel()).to(tensor).reshape(tensor.shape)
            finite = torch.where(tensor.isfinite(), tensor, 0.0)
            part = (torch.tanh(finite) * weights).float().mean()
            total = part if total is None else total + part
    if total is None:
        raise CutError("example", "No output of the model requires a gradient.")
    return total


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set every module of a model to evaluation mode in the block, and restore its mode afterwards.

    So are quantized weights, which a library may repack in this mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with weights_kept(model):
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def checking(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode in the block, but modules that hold a quantized weight to training mode.

    They have one kernel for what trains, and others for evaluations, some of which give no gradient.
    """
    with evaluating(model):
        for module in filter(has_few_bits, model.modules()):
            module.training = True
        yield


def _tensors(outputs: PyTree) -> dict[str, torch.Tensor]:
    """The tensors by key path: the order of an output's entries is that in which the model has set them."""
    found = {leaf.path: leaf.value for leaf in leaves(outputs, name="outputs") if isinstance(leaf.value, torch.Tensor)}
    return dict(sorted(found.items()))


def _distance(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """How far a tensor is from what it should be; infinitely, if there is only one of them."""
    if one is None or other is None:
        return math.inf
    one, other = (t if t.is_floating_point() or t.is_complex() else t.double() for t in (one, other))
    return distance(digest(one), digest(other))


# Digest the gradients of a model as they are computed, so that no two parameters have one at the same time.


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
    """Untie large parameters in the block: each place gets its own parameter, over the same memory.

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
