"""Run an optimizer step for a few parameters at a time, bitwise identical to one step for all parameters.

Most optimizers update each parameter from its value, its gradient and its own state only, so updating a few parameters
at a time, in any order, equals one step for all parameters. A temporary optimizer of the same class, with the same
options and state, updates a few parameters.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import sys
import threading
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from yobx_flatten.core.private_names.of_torch import is_traceable_wrapper_subclass
from yobx_flatten.errors.failures import result_or

from ..device.worker import Worker, generator_kept
from ..errors import ConfigError, StageError
from .torch_steps import PART, Optimizer, dtype_of_gradient

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class OptimizerParts:
    """Runs an optimizer step for a few parameters at a time."""

    # hold_state: function that gets a parameter and its state after each update, and may move the tensors of the state.
    # Default: the tensors stay where the optimizer created them.

    def __init__(
        self, optimizer: Optimizer, hold_state: Callable[[torch.Tensor, dict[str, Any]], None] = lambda p, state: None
    ) -> None:
        self._optimizer, self._hold_state = optimizer, hold_state
        self._before = self._after = [_options(group) for group in optimizer.param_groups]
        self._attributes = self._attributes_after = _attributes(optimizer)
        self._gradients = [
            {p: (p.grad, p.grad._version) for p in group["params"] if p.grad is not None}
            for group in optimizer.param_groups
        ]
        self.parameters: list[torch.Tensor] = list(dict.fromkeys(itertools.chain.from_iterable(self._gradients)))

    def give(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Store gradients that were computed after the beginning of the optimizer step, for :meth:`step`."""
        for group, known in zip(self._optimizer.param_groups, self._gradients, strict=True):
            known.update({p: (gradients[p], gradients[p]._version) for p in group["params"] if p in gradients})

    def step(self, parameters: Collection[int]) -> None:
        """Update the parameters with the given ids, and drop the references to their gradients."""
        part, owners = self._part(parameters)
        if not owners:
            return
        with torch.no_grad():
            _own_step(part)()  # with the options from the beginning of the whole step
        for alias, parameter in owners.items():
            if alias in part.state:
                self._hold_state(parameter, part.state[alias])
                self._optimizer.state[parameter] = part.state[alias]
        self._after = [_options(group) for group in part.param_groups]
        self._attributes_after = _attributes(part)

    def finish(self) -> Optimizer:
        """End the step, and return an optimizer without parameters, which torch can step instead."""
        for group, before, after in zip(self._optimizer.param_groups, self._before, self._after, strict=False):
            group.update(_changed(before, after))
        self._optimizer.__dict__.update(_changed(self._attributes, self._attributes_after))
        return self._part(())[0]

    def _part(self, parameters: Collection[int]) -> tuple[Optimizer, dict[nn.Parameter, torch.Tensor]]:
        owners: dict[nn.Parameter, torch.Tensor] = {}
        groups = []
        for options, gradients in zip(self._before, self._gradients, strict=True):
            aliases = []
            for parameter in [p for p in gradients if id(p) in parameters]:
                gradient, version = gradients.pop(parameter)
                if gradient._version != version:
                    raise StageError(
                        f"The gradient of a {tuple(parameter.shape)} parameter was written while the optimizer's step "
                        'still needed it. Clear gradients in the function given to step(..., is_async="exact"):\n'
                        '    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async="exact")'
                    )
                # The parameter itself may already have a gradient of the next run.
                alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                alias.__dict__.update(parameter.__dict__)
                alias.grad = gradient.to(alias.dtype)  # the gradient of a master weight may have fewer bits
                owners[alias] = parameter
                aliases.append(alias)
            groups.append({**options, "params": aliases})
        state: dict[torch.Tensor, Any] = {
            alias: self._optimizer.state[p] for alias, p in owners.items() if p in self._optimizer.state
        }
        return _twin(self._optimizer, groups, state, self._attributes), owners


def _twin(
    optimizer: Optimizer, groups: list[dict[str, Any]], state: dict[torch.Tensor, Any], attributes: Mapping[str, Any]
) -> Optimizer:
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(attributes)
    for name in _HOOKS:  # the hooks of the optimizer do not run for its parts
        twin.__dict__[name] = type(optimizer.__dict__[name])()
    twin.state = defaultdict(dict, state)
    twin.param_groups = groups
    twin.__dict__[PART] = True
    return twin


def _own_step(optimizer: Optimizer) -> Any:
    step: Any = type(optimizer).step
    return step.__wrapped__.__get__(optimizer)  # torch wraps the method of the class to call hooks


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    # tensors are copied, because a scheduler writes a learning rate in place
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {k: v for k, v in optimizer.__dict__.items() if k not in ("state", "param_groups", PART, *_HOOKS)}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    # Tensor options are left out, because a scheduler may have written them meanwhile.
    values = {k: v for k, v in after.items() if not isinstance(v, torch.Tensor)}
    return {k: v for k, v in values.items() if k not in before or v is not before[k]}


def widened(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optimizer:
    """Run an optimizer step if a gradient has another dtype than its parameter; else leave the step to torch."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if all(dtype_of_gradient(p) == p.dtype for p in held):
        return optimizer
    if any(argument is not None for argument in (*args[1:], *kwargs.values())):
        raise ConfigError(
            f"{type(optimizer).__name__} was given a closure, but gradient_dtype needs all gradients before the step. "
            "Leave out gradient_dtype:\n    RoundPipe(model, optim_dtype=torch.float32)"
        )
    parts = OptimizerParts(optimizer)
    # one parameter at a time if possible, so that few wide gradients are in memory
    pieces = [{id(p)} for p in parts.parameters]
    for piece in pieces if can_step_in_parts(optimizer) else [set().union(*pieces)]:
        parts.step(piece)
    return parts.finish()


# Parameters of a group in a trial: two of the same shape, one without a gradient, and one of another shape.
_STAND_INS = 4
_GROUPS, _WIDEST, _STEPS = 8, 6, 2
_PATIENCE = 10.0  # seconds to wait for the random generator, which a layer holds during its call
_FOUND: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()


def can_step_in_parts(optimizer: Optimizer) -> bool:
    """Return whether updating one parameter after the other is bitwise identical to a step for all parameters.

    The results of both are compared on small tensors, with the options and states of a few parameters of each group.
    The results differ if an update depends on several parameters, on their order, or on random numbers.
    """

    def has_same_bits() -> bool:
        with _trial():
            whole, parts = _stand_in(optimizer), _stand_in(optimizer)
            for step in range(_STEPS):
                _give_gradients(whole, optimizer, step)
                _give_gradients(parts, optimizer, step)
                _own_step(whole)()
                pieces = OptimizerParts(parts)
                for parameter in reversed(pieces.parameters):
                    pieces.step({id(parameter)})
                pieces.finish()
            return _equal(_attributes(whole), _attributes(parts)) and _equal(_contents(whole), _contents(parts))

    found = _FOUND.get(optimizer)
    if found is None or found[0] != len(optimizer.param_groups):
        # an optimizer that raises an error for small tensors cannot be checked
        is_proven = hasattr(type(optimizer).step, "__wrapped__") and result_or(has_same_bits, lambda error: False)
        _FOUND[optimizer] = found = len(optimizer.param_groups), is_proven
    return found[1]


def state_share(optimizer: Optimizer) -> float:
    """Return the bytes of optimizer state per byte of a parameter, measured on small placeholders."""

    def measured() -> float:
        with _trial():
            stand_in = _stand_in(optimizer)
            _give_gradients(stand_in, optimizer, 0)
            _own_step(stand_in)()
        kept = {p: [v for v in state.values() if isinstance(v, torch.Tensor)] for p, state in stand_in.state.items()}
        return max((sum(v.nbytes for v in held if v.dim()) / p.nbytes for p, held in kept.items()), default=0.0)

    return result_or(measured, lambda error: 0.0)


@contextlib.contextmanager
def _trial() -> Iterator[None]:
    """Prepare trial steps on small tensors: disable compilation, and restore the random generator at the end."""
    # Compilation for the shapes of the trial would take seconds. Layers draw from the generator in parallel. The wait
    # for the generator is limited, because the layer that holds it may wait for this step.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with generator_kept(_PATIENCE), warnings.catch_warnings(), eager:
        warnings.simplefilter("ignore")
        yield


def _stand_in(optimizer: Optimizer) -> Optimizer:
    generator = torch.Generator().manual_seed(0)
    groups: list[dict[str, Any]] = []
    state: dict[torch.Tensor, Any] = {}
    for group in optimizer.param_groups[:_GROUPS]:
        held = [p for p in group["params"] if p.requires_grad]
        others = {p.ndim: p for p in reversed(held[_STAND_INS - 1 :])}  # a later parameter per number of axes
        parameters = []
        for parameter in [*held[: _STAND_INS - 1], *others.values()]:
            shape = [min(size, _WIDEST) for size in parameter.shape]  # slicing a DTensor would be a collective call
            values = torch.randn(shape, dtype=torch.float64, generator=generator).to(parameter.dtype)
            stand_in = nn.Parameter(values, requires_grad=True)
            stand_in.__dict__.update(parameter.__dict__)
            own = optimizer.state.get(parameter, {})
            # 8-bit moments have a scale per block and cannot be sliced, so the step creates a new state.
            if own and not any(map(is_traceable_wrapper_subclass, own.values())):
                first = tuple(slice(0, _WIDEST) for _ in parameter.shape)
                is_like = {k: isinstance(v, torch.Tensor) and v.ndim == parameter.ndim for k, v in own.items()}
                state[stand_in] = {k: v[first].clone() if is_like[k] else copy.deepcopy(v) for k, v in own.items()}
            parameters.append(stand_in)
        groups.append({**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": parameters})
    # a gradient scaler may have left an instruction to skip the step
    attributes = {k: None if k in ("grad_scale", "found_inf") else v for k, v in _attributes(optimizer).items()}
    return _twin(optimizer, groups, state, attributes)


def _give_gradients(stand_in: Optimizer, optimizer: Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(1 + step)
    for group, real in zip(stand_in.param_groups, optimizer.param_groups, strict=False):
        sparse = next((p.grad for p in real["params"] if p.grad is not None and p.grad.layout != torch.strided), None)
        for number, parameter in enumerate(group["params"]):
            values = torch.randn(parameter.shape, dtype=torch.float64, generator=generator).to(parameter.dtype)
            is_left_out = len(group["params"]) > 2 and number == 1
            if sparse is not None and parameter.ndim >= sparse.sparse_dim():
                values = values.to_sparse(sparse.sparse_dim())
            parameter.grad = None if is_left_out else values


def _contents(optimizer: Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield {k: v for k, v in group.items() if k != "params"}
        for parameter in group["params"]:
            yield parameter.detach()
            yield dict(optimizer.state.get(parameter, {}))


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, Iterator)):
        return all(itertools.starmap(_equal, zip(one, other, strict=True)))
    return bool(one == other)


LANDING = 2  # layers whose gradients may be in transit from devices to the disk or to their step


class LandingQueue:
    """Runs one task per layer in a thread, for the layer's gradients, and limits the number of unfinished tasks."""

    def __init__(self, name: str) -> None:
        self._worker = Worker(name)
        self._left: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    def submit(self, task: Callable[..., None], *args: Any) -> Future[None]:
        """Start a task for the gradients of a layer; if too many tasks are unfinished, wait for the earliest tasks."""
        with self._lock:
            started = self._worker.submit(task, *args)
            self._left.append(started)
            earlier = [self._left.popleft() for _ in range(len(self._left) - LANDING)]
        for one in earlier:
            one.result()
        return started

    def wait(self) -> None:
        with self._lock:
            left = list(self._left)
            self._left.clear()
        for one in left:
            one.result()

    def close(self) -> None:
        self._worker.close()


_SAMPLE = 32  # values of a tensor that are compared


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """A snapshot of a tensor to detect later writes, including writes by ``tensor.data``, which torch does not count.

    >>> tensor = torch.zeros(100)
    >>> mark = Mark.of(tensor)
    >>> tensor.data.fill_(1).sum().item(), mark.is_counted(tensor), mark.has_numbers(tensor)
    (100.0, False, False)
    """

    source: weakref.ref[torch.Tensor]
    version: int
    address: int
    sample: torch.Tensor | None  # some values, as bytes; `None` if they are not compared

    @classmethod
    def of(cls, tensor: torch.Tensor, *, with_numbers: bool = True) -> Mark:
        if not is_plain(tensor):
            return cls(weakref.ref(tensor), tensor._version, 0, None)
        return cls(weakref.ref(tensor), tensor._version, tensor.data_ptr(), _sample(tensor) if with_numbers else None)

    def is_counted(self, tensor: torch.Tensor) -> bool:
        """Return whether torch has counted an in-place write since the snapshot, or ``tensor`` is another tensor."""
        return self.source() is not tensor or self.version != tensor._version

    def has_numbers(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor still has the values that are stored in the snapshot."""
        return self.sample is None or torch.equal(self.sample, _sample(tensor))


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether torch counts in-place writes to a tensor, which is not the case for wrapper subclasses."""
    is_itself = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)
    return is_itself and not tensor.is_inference()  # an inference tensor has no version


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat, size = tensor.detach(), int(tensor.numel())
    if not flat.is_contiguous():
        held = flat.untyped_storage().nbytes() // flat.element_size() - int(flat.storage_offset())
        size = min(size, held)
    step = max(1, size // _SAMPLE)
    return flat.as_strided((min(_SAMPLE, size // step),), (step,)).clone().view(torch.uint8)
