"""Compare outputs and gradients of a split model with those of the original model, on a small batch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from yobx_flatten import leaves
from yobx_flatten.core.compare import tolerance
from yobx_flatten.core.interrupts import Undoing
from yobx_flatten.registry.recipe.aliases import Kwargs, PyTree

from ...device.composite import has_few_bits, weights_kept
from ...device.protocol import Event
from ...device.virtual import VirtualDevice
from ...engine.config import RoundPipeRunConfig
from ...engine.digests import Digest, digest, distance, typical
from ...engine.driver import Engine
from ...engine.lifecycle import EngineOptions
from ...errors import CutError
from ...optim.layer_contents import scan
from ...optim.parameters import is_watched


def check_equivalence(
    model: nn.Module, pieces: Sequence[nn.Module], args: tuple[Any, ...], kwargs: Kwargs
) -> Equivalence:
    """Check that the modules of a split model, run on one device, give the outputs and gradients of the model.

    The check needs memory for the gradients of one module only, because each gradient is reduced to a digest when it is
    computed. The check does not change ``grad`` of the parameters.
    """
    with own_gradients(model) as plain, untied(model, plain), torch.enable_grad():
        outputs = model(*args, **kwargs)
        expected = objective(outputs, None)
        torch.autograd.backward(expected)
    whole: dict[str, Any] = {"num_microbatch": 1, "split_input": lambda args, kwargs, _: ([args], [kwargs])}
    config = RoundPipeRunConfig(requires_grad=True, preserve_rng_state=False, **whole).resolved(1)
    with engine_on_host(model, pieces) as engine, own_gradients(model) as found, torch.enable_grad():
        engine.take_gradient = found.offer
        loss, cut = engine.forward_backward(args, kwargs, None, objective, True, config)
    there, here = _tensors(cut), _tensors(outputs)
    pairs = [*((there.get(path), here.get(path)) for path in {**there, **here}), (loss, expected)]
    worst_output = max((_distance(one, other) for one, other in pairs), default=0.0)
    least = 0.1 * max(map(typical, plain.digests.values()), default=0.0)
    worst, name = 0.0, ""
    for key in sorted({*plain.digests, *found.digests}):
        if (apart := distance(found.digests.get(key), plain.digests.get(key), least)) > worst:
            worst, name = apart, key
    result = Equivalence(worst_output, worst, name, len(plain.digests))
    limit, of_gradients = (tolerance(kind, *(p.dtype for p in model.parameters())) for kind in ("layers", "gradients"))
    if not (worst_output <= limit and worst <= of_gradients):
        raise CutError(
            "values",
            f"after the split, outputs differ by {worst_output:.1e} and gradients by {worst:.1e} ({name or 'none'}). "
            f"The limits are {limit:.0e} for outputs and {of_gradients:.0e} for gradients",
        )
    return result


def engine_on_host(model: nn.Module, pieces: Sequence[nn.Module]) -> contextlib.closing[Engine]:
    """Return a context manager that yields an engine, which runs ``pieces`` on the host without copying parameters."""
    return contextlib.closing(Engine(model, pieces, [_Host("check")], EngineOptions(None, "check")))


class _Host(VirtualDevice):
    """A device of the engine that computes on the host, with the model's parameters instead of copies."""

    def copy_in(self, tensor: torch.Tensor, ready: Event | None = None, *, parameter: bool = False) -> torch.Tensor:
        return tensor if parameter else super().copy_in(tensor, ready)


def objective(outputs: PyTree, labels: Any) -> torch.Tensor:
    """Return a loss that depends on every value in the outputs, so that every parameter gets a gradient."""
    total: torch.Tensor | None = None
    for tensor in _tensors(outputs).values():
        if tensor.requires_grad:
            weights = torch.linspace(0.5, 1.5, tensor.numel()).to(tensor).reshape(tensor.shape)
            finite = torch.where(tensor.isfinite(), tensor, 0.0)
            part = (torch.tanh(finite) * weights).float().mean()
            total = part if total is None else total + part
    if total is None:
        raise CutError("example", "No output of the model requires a gradient, so gradients cannot be compared.")
    return total


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager in which all modules of a model are in evaluation mode; restores their modes afterwards."""
    modes = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, training in modes:
            module.training = training

    with (undoing := Undoing(restore)), undoing:
        model.eval()
        with weights_kept(model):  # a library may repack quantized weights in evaluation mode
            yield


@contextlib.contextmanager
def checking(model: nn.Module) -> Iterator[None]:
    """Context manager in which a model is in evaluation mode, except for modules with quantized weights."""
    # the kernels that quantized modules use in evaluation mode may give no gradient
    with evaluating(model):
        for module in filter(has_few_bits, model.modules()):
            module.training = True
        yield


def _tensors(outputs: PyTree) -> dict[str, torch.Tensor]:
    """Return the tensors of an output, sorted by path, because a model may set entries in any order."""
    found = {leaf.path: leaf.value for leaf in leaves(outputs, name="outputs") if isinstance(leaf.value, torch.Tensor)}
    return dict(sorted(found.items()))


def _distance(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    if one is None or other is None:
        return math.inf
    one, other = (t if t.is_floating_point() or t.is_complex() else t.double() for t in (one, other))
    return distance(digest(one), digest(other))


# Gradients are kept whole in a model of at most this many bytes, or with at most this many elements.
_SMALL, _WHOLE = 2**26, 2**10


class Gradients:
    """Collects a digest of each gradient: all of its values, or random projections of a large gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.digests: dict[str, Digest] = {}  # by the name of the parameter
        self.is_small = sum(p.nbytes for p in model.parameters()) <= _SMALL
        self.watched = {id(parameter) for parameter in model.parameters() if is_watched(parameter)}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        name, found = self._names[id(parameter)], digest(gradient, whole=None if self.is_small else _WHOLE)
        before = self.digests.get(name)
        self.digests[name] = found if before is None else before + found

    def offer(self, parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
        """Store a digest of a gradient, unless hooks need the summed gradient; return whether it was stored."""
        if id(parameter) in self.watched:
            return False
        self.add(parameter, gradient)
        return True


@contextlib.contextmanager
def own_gradients(model: nn.Module) -> Iterator[Gradients]:
    """Context manager that collects digests of the gradients computed in it, and restores each ``grad`` afterwards."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    found = Gradients(model)

    def restore() -> None:
        for parameter, gradient in before:
            parameter.grad = gradient

    with contextlib.ExitStack() as stack, (undoing := Undoing(restore)), undoing:
        for parameter, _ in before:
            parameter.grad = None
            stack.enter_context(_collecting(found, parameter, parameter))
        yield found
        for parameter, _ in before:
            _collect(found, parameter, parameter)  # gradients that were set without autograd


@contextlib.contextmanager
def untied(model: nn.Module, found: Gradients) -> Iterator[None]:
    """Context manager in which large tied parameters are separate parameters that share their memory."""
    # autograd would sum the gradients of an embedding and its tied head, which needs three more tensors of this size
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


def _collecting(
    found: Gradients, parameter: nn.Parameter, place: nn.Parameter
) -> contextlib.AbstractContextManager[object]:
    # each gradient of `place` is added to the digest of `parameter`, then dropped
    if not (place.requires_grad and place.is_leaf):
        return contextlib.nullcontext()
    handle: RemovableHandle = place.register_post_accumulate_grad_hook(functools.partial(_collect, found, parameter))
    return handle


def _collect(found: Gradients, parameter: nn.Parameter, place: torch.Tensor) -> None:
    if place.grad is not None:
        found.add(parameter, place.grad)
        place.grad = None


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """Relative differences between the results of the split model and of the original model for the example.

    Each difference is the norm of the difference of two tensors, divided by the norm of the original model's tensor.

    Attributes:
        outputs: largest difference of the tensors that the model returns, including the loss.
        gradients: largest difference of the gradients of all parameters. Very small gradients have a larger divisor.
        worst: name of the parameter whose gradient has the largest difference.
        parameters: number of parameters that got a gradient in the original model.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from roundpipe_runtime import cut
    >>> tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9)
    >>> found = cut(LlamaForCausalLM(tiny)).report.equivalence
    >>> found.outputs < 1e-5, found.gradients < 1e-5, found.parameters
    (True, True, 21)
    """

    outputs: float
    gradients: float
    worst: str
    parameters: int


@dataclasses.dataclass(frozen=True)
class CutReport:
    """The report of a split model: its modules, their sizes, and differences from the original model.

    Attributes:
        model: class of the model.
        lists: names of the lists of modules that contain the layers.
        pieces: names of the modules of the pipeline, in order.
        bytes: bytes of the parameters of each module of the pipeline.
        equivalence: differences from the original model; ``None`` if they were not checked.
        refused: reason and message for each attempt to split the model that failed.
        losses: one line of text for each kind of call whose loss was checked. A line names the arguments of the call,
            and describes how the loss is computed.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from roundpipe_runtime import cut
    >>> tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9)
    >>> report = cut(LlamaForCausalLM(tiny), check=False).report
    >>> report.model, report.lists, report.equivalence
    ('LlamaForCausalLM', ('model.layers',), None)
    """

    model: str
    lists: tuple[str, ...]
    pieces: tuple[str, ...]
    bytes: tuple[int, ...]
    equivalence: Equivalence | None
    refused: tuple[tuple[str, str], ...] = ()
    losses: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether the model was not split."""
        return not self.lists

    @property
    def phases(self) -> int:
        """The number of modules that run code outside of layers, which is 2 if there is no code between layers."""
        return sum(piece.startswith("phase ") for piece in self.pieces)

    def __str__(self) -> str:
        lines = [f"{self.model}: {len(self.pieces)} pieces"]
        if self.lists:
            calls = len(self.pieces) - self.phases
            lines[0] += f", {calls} calls of layers in {', '.join(self.lists)}, {self.phases} phases"
        largest = max(self.bytes, default=0)
        lines.append(f"largest piece: {largest / 1e6:.3g} MB of {sum(self.bytes) / 1e6:.3g} MB")
        if self.equivalence is not None:
            found = self.equivalence
            lines.append(
                f"on the example: outputs differ by {found.outputs:.1e}, the gradients of {found.parameters} "
                f"parameters by {found.gradients:.1e}"
            )
        lines += [f"loss in {one}" for one in self.losses]
        lines += [f"not split in another way, {reason}: {message}" for reason, message in self.refused]
        return "\n".join(lines)
