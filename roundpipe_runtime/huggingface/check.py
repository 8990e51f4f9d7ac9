"""Runs a cut model beside the plain one, on a small batch, and compares outputs and every gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..config import RoundPipeRunConfig
from ..device import VirtualDevice
from ..engine import Engine
from .errors import CutError
from .report import Equivalence

__all__ = ["check_equivalence", "evaluating", "objective", "tolerance"]

# Gradients of what is used several times are summed in another order than in the plain model.
_SUMS = 10


def check_equivalence(
    model: nn.Module, pieces: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Equivalence:
    """Return how far the pieces, run by the engine on one device, are from the model.

    Gradients that the model holds are left alone.

    Args:
        model: the model, in evaluation mode.
        pieces: what it was cut into.
        args: positional arguments.
        kwargs: keyword arguments.

    Raises:
        CutError: they differ by more than rounding.
    """
    expected, outputs, gradients = _plain(model, args, kwargs)
    device = VirtualDevice("check")
    engine = Engine(model, pieces, [device], None, "check")
    config = RoundPipeRunConfig(
        num_microbatch=1, requires_grad=True, preserve_rng_state=False, split_input=_uncut
    ).resolved(1)
    try:
        with _own_gradients(model) as found, torch.enable_grad():
            loss, cut = engine.forward_backward(args, kwargs, None, objective, True, config)
            cut_gradients = found()
    finally:
        engine.close()
    pairs = [*zip(_tensors(cut), _tensors(outputs), strict=True), (loss, expected)]
    worst_output = max((_distance(one, other) for one, other in pairs), default=0.0)
    worst, name = 0.0, ""
    typical = _typical(gradients)
    for key in sorted({*gradients, *cut_gradients}):
        distance = _gradient_distance(cut_gradients.get(key), gradients.get(key), typical)
        if distance > worst:
            worst, name = distance, key
    result = Equivalence(worst_output, worst, name, len(gradients))
    limit = tolerance(model)
    if not (worst_output <= limit and worst <= _SUMS * limit):
        raise CutError(
            "values",
            f"cut, outputs differ by {worst_output:.1e} and gradients by {worst:.1e} ({name or 'none'}); at most "
            f"{limit:.0e} and {_SUMS * limit:.0e} are rounding",
        )
    return result


def _uncut(args: Any, kwargs: Any, num_microbatch: int) -> tuple[list[Any], list[Any]]:
    return [args], [kwargs]


def tolerance(model: nn.Module) -> float:
    """Return which difference is rounding, for the dtypes of a model's parameters."""
    floats = [p.dtype for p in model.parameters() if p.is_floating_point()]
    coarsest = max((torch.finfo(dtype).eps for dtype in set(floats)), default=1e-7)
    return max(1e-6, 8 * coarsest) if coarsest < 1e-6 else 4 * coarsest


def objective(outputs: Any, labels: Any) -> torch.Tensor:
    """Return one number in which every number of the outputs takes part: a loss that finds every gradient."""
    total: torch.Tensor | None = None
    for tensor in _tensors(outputs):
        if tensor.requires_grad:
            weights = torch.linspace(0.5, 1.5, tensor.numel()).to(tensor).reshape(tensor.shape)
            finite = torch.where(tensor.isfinite(), tensor, 0.0)
            part = (torch.tanh(finite) * weights).float().mean()
            total = part if total is None else total + part
    if total is None:
        raise CutError("example", "Nothing that the model returns requires a gradient.")
    return total


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch every module of a model to evaluation in the block, and back to what it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _plain(model: nn.Module, args: Any, kwargs: Any) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
    with _own_gradients(model) as found, torch.enable_grad():
        outputs = model(*args, **kwargs)
        loss = objective(outputs, None)
        torch.autograd.backward(loss)
        return loss.detach(), outputs, found()


@contextlib.contextmanager
def _own_gradients(model: nn.Module) -> Iterator[Callable[[], dict[str, torch.Tensor]]]:
    """Put the gradients of a model aside in the block; yields a function that returns those that came instead."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]

    def found() -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    try:
        for parameter, _ in before:
            parameter.grad = None
        yield found
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _distance(one: torch.Tensor, other: torch.Tensor, least: float = 0.0) -> float:
    if one.shape != other.shape:
        return float("inf")
    one, other = one.detach().double(), other.detach().double()
    same = (one == other) | (one.isnan() & other.isnan())
    difference = torch.where(same, 0.0, one - other).norm().item()
    scale = max(torch.where(other.isfinite(), other, 0.0).norm().item(), least * other.numel() ** 0.5, 1e-30)
    return difference / scale if difference else 0.0


def _typical(gradients: dict[str, torch.Tensor]) -> float:
    """The size below which a gradient is rounding, like that of the bias of keys, which a softmax takes away."""
    finite = [torch.where(gradient.isfinite(), gradient, 0.0).double() for gradient in gradients.values()]
    return 0.1 * max((gradient.norm().item() / max(gradient.numel(), 1) ** 0.5 for gradient in finite), default=0.0)


def _gradient_distance(one: torch.Tensor | None, other: torch.Tensor | None, least: float) -> float:
    """A gradient that one of them lacks is the same as one of zeros."""
    if one is None or other is None:
        present = other if one is None else one
        return 0.0 if present is None or not present.any() else float("inf")
    return _distance(one, other, least)
