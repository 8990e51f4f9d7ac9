"""Find the tensors in quantized weights, such as 4-bit values and their scales, and rebuild weights from copies.

A quantized weight is recognized by its method ``__tensor_flatten__`` or by tensors in its attributes, not by its
library. Only frozen weights are rebuilt from copies. :func:`check_copyable` tests this for one weight of each class.
"""

# a wrapper subclass   weight ── __tensor_flatten__ ──> qdata, scale ──> copies ── __tensor_unflatten__ ──> weight
# with attributes      weight ──> its numbers, and the tensors in quant_state ──> copies ──> a weight with a new state
# state of its module  module.state ──> CB, in the memory of the numbers ──> the copy that is there already

from __future__ import annotations

import contextlib
import enum
import gc
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import nn

from yobx_flatten import find_unregistered
from yobx_flatten.core.private_names.of_torch import DisableTorchFunctionSubclass, is_traceable_wrapper_subclass
from yobx_flatten.errors.failures import first_line, result_or

from ..errors import ConfigError

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # parameters, buffers, hooks and modes

# Objects that are not searched for tensors of a weight.
_NOT_ENTERED = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)

# The children of a value, and a function that makes an equal value from other children.
_Opened: TypeAlias = "tuple[list[Any], Callable[[list[Any]], Any]]"


class StateSlot(NamedTuple):
    owner: nn.Module
    name: str
    value: Any


def is_composite(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is frozen and contains other tensors, such as the scales of a quantized weight."""
    if type(parameter) in (nn.Parameter, torch.Tensor) or parameter.requires_grad:
        return False
    return is_wrapper(parameter) or next(all_tensors(vars(parameter)), None) is not None


def states_of(module: nn.Module) -> list[StateSlot]:
    """Return the attributes in which a module stores data of its frozen quantized weights."""
    if not any(_is_in_few_bits(p) for p in module._parameters.values() if p is not None):
        return []
    found = ((name, value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE)
    return [StateSlot(module, name, value) for name, value in found if _may_get_tensors(value)]


def parts_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return all plain tensors in ``values``, including the tensors inside quantized weights, without duplicates."""
    found: dict[Any, torch.Tensor] = {}
    for value in values:
        is_whole = isinstance(value, torch.Tensor) and not is_composite(value)
        held = [value, vars(value)] if isinstance(value, torch.Tensor) else value
        for tensor in (value,) if is_whole else all_tensors(held):
            found.setdefault(id(tensor) if is_whole else memory_of(tensor), tensor)
    return list(found.values())


def stored_bytes(tensor: torch.Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in parts_of([tensor]))


def all_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield each plain tensor in a nested value, but not the tensors in modules."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor) and not is_wrapper(one):
            yield one
        elif (opened := _opened(one)) is not None:
            waiting += reversed(opened[0])


def plain_numbers(tensor: torch.Tensor) -> torch.Tensor:
    with DisableTorchFunctionSubclass():
        return tensor.detach()


class Rebuilding:
    """Copies quantized weights, and attributes that modules store for these weights, by copying the tensors inside."""

    # place: function that returns the copy of a plain tensor, called once for a tensor that several values share

    def __init__(self, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._place = place
        self._placed: dict[Any, torch.Tensor] = {}
        # Original and rebuilt objects by id; originals are kept alive so that no id is reused.
        self._made: dict[int, tuple[Any, Any]] = {}

    def parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a parameter of the same class with copies of its tensors; repeated calls return the same object."""
        if id(parameter) in self._made:
            return cast("nn.Parameter", self._made[id(parameter)][1])
        if is_wrapper(parameter):
            copy = nn.Parameter(self._of_wrapper(parameter), requires_grad=False)
            left = {name: held for name, held in vars(parameter).items() if name not in vars(copy)}
        else:
            copy = nn.Parameter(self._of_tensor(parameter), requires_grad=False)
            copy.__class__ = type(parameter)
            left = vars(parameter)
        self._made[id(parameter)] = parameter, copy
        copy.__dict__.update({name: self.value(held) for name, held in left.items()})
        return copy

    def state(self, value: Any) -> Any:
        """Return a copy of an attribute in which a module stores data of a quantized weight."""
        made = self.value(value)
        opened = _opened(value)
        return opened[1](opened[0]) if made is value and opened is not None else made

    def value(self, value: Any) -> Any:
        """Return a value in which all tensors are replaced by copies; a value without tensors is returned unchanged."""
        if id(value) in self._made:
            return self._made[id(value)][1]
        if isinstance(value, torch.Tensor):
            return self._of_wrapper(value) if is_wrapper(value) else self._of_tensor(value)
        opened = _opened(value)
        if opened is None:
            return value
        self._made[id(value)] = value, value  # its children may refer to it
        children = [self.value(child) for child in opened[0]]
        if any(new is not old for new, old in zip(children, opened[0], strict=True)):
            self._made[id(value)] = value, opened[1](children)
        return self._made[id(value)][1]

    def _of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        key = memory_of(tensor)
        if key not in self._placed:
            self._placed[key] = self._place(tensor)
        return self._placed[key]

    def _of_wrapper(self, tensor: torch.Tensor) -> torch.Tensor:
        inner, together = _flattened(tensor)
        copies = [self.value(one) for one in inner]
        made: torch.Tensor = together(copies)
        if copies and made.device != (device := copies[0].device):
            kind = type(tensor)
            raise ConfigError(
                f"A weight of class {kind.__module__}.{kind.__qualname__} was copied to {device}, but the copy reports "
                f"that it is on {made.device}, because the class stores the device in its metadata. Quantize with "
                "another class, or run on virtual devices:\n"
                '    wrap_model_to_roundpipe(model, devices="virtual:2")'
            )
        return made


def is_wrapper(tensor: torch.Tensor) -> bool:
    return type(tensor) is not torch.Tensor and bool(is_traceable_wrapper_subclass(tensor))


def _is_in_few_bits(parameter: nn.Parameter) -> bool:
    if type(parameter) is nn.Parameter:
        return not parameter.requires_grad and not (parameter.is_floating_point() or parameter.is_complex())
    return is_composite(parameter) or not (parameter.is_floating_point() or parameter.requires_grad)


def _may_get_tensors(value: Any) -> bool:
    opened = None if isinstance(value, torch.Tensor) else _opened(value)
    if opened is None:
        return isinstance(value, torch.Tensor)
    return type(value) not in (dict, list, tuple) or next(all_tensors(value), None) is not None


def memory_of(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors with the same memory, shape, strides and dtype."""
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return id(tensor)
    with DisableTorchFunctionSubclass():
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _flattened(tensor: torch.Tensor) -> _Opened:
    names, metadata = tensor.__tensor_flatten__()  # type: ignore[attr-defined] # of wrapper subclasses
    size, stride = tensor.size(), tensor.stride()

    def together(inner: list[Any]) -> Any:
        named = dict(zip(names, inner, strict=True))
        return type(tensor).__tensor_unflatten__(named, metadata, size, stride)  # type: ignore[attr-defined] # the same

    return [getattr(tensor, name) for name in names], together


def _opened(value: Any) -> _Opened | None:
    """Return the values in a container and a function that rebuilds it; ``None`` if ``value`` is not a container."""
    kind = type(value)
    if kind is dict:
        keys = list(value)
        return list(value.values()), lambda new: dict(zip(keys, new, strict=True))
    if kind in (list, tuple):
        return list(value), kind
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return list(value), lambda new: kind(*new)
    if isinstance(value, torch.Tensor):
        return _flattened(value) if is_wrapper(value) else None
    if isinstance(value, (nn.Module, type, enum.Enum)) or kind.__module__ == "builtins":
        return None
    bases: Sequence[type] = kind.__mro__[:-1]
    # an instance stores all its values in `__dict__` if every base is made by a `class` statement without slots:
    # CPython's flags are those of a heap type that is not immutable
    if not all(base.__flags__ & 0x300 == 0x200 and not vars(base).get("__slots__") for base in bases):
        return None
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict):
        return None
    names = list(held)

    def together(new: list[Any]) -> Any:
        made: Any = object.__new__(kind)
        made.__dict__.update(zip(names, new, strict=True))
        return made

    return list(held.values()), together


def check_copyable(model: nn.Module) -> None:
    proved: set[object] = set()
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(
                f"{name} is on the meta device, and has no values. Load the model, or initialize it, first:\n"
                "    model.to_empty(device='cpu'); model.load_state_dict(state)"
            )
        check_gradient(name, parameter)
        if type(parameter) in (nn.Parameter, torch.Tensor):
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        if reason := _reason(owner, parameter, proved):
            kind = type(parameter)
            raise ConfigError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}, {reason} Load the model without quantization:\n"
                "    AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16)"
            )


def check_gradient(title: str, parameter: nn.Parameter) -> None:
    gradient = parameter.grad if parameter.is_leaf else None  # torch warns about `grad` of other tensors
    if gradient is not None and gradient.shape != parameter.shape:
        raise ConfigError(
            f"{title} was resized from {tuple(gradient.shape)} to {tuple(parameter.shape)}, and its gradient has the "
            "old size. Clear the gradients first:\n    model.zero_grad()"
        )


def _reason(owner: nn.Module, parameter: nn.Parameter, proved: set[object]) -> str | None:
    """Return why a parameter cannot be copied to a device, as the end of an error message; ``None`` if it can be."""
    trains = "it is trainable. Quantized weights must be frozen. Train adapters, or all weights without quantization."
    if not (is_wrapper(parameter) or is_composite(parameter)):
        attributes = vars(parameter)
        hidden = [name for name, value in attributes.items() if isinstance(value, torch.Tensor)]
        hidden += [found.path.removeprefix("held")[2:-2] for found in find_unregistered(attributes, name="held")]
        why = trains if parameter.requires_grad else "a copy would lack these tensors."
        return f"which stores tensors in its attribute {hidden[0]!r}, and {why}" if hidden else None
    parts = parts_of([parameter])
    kind = type(owner), type(parameter), parameter.requires_grad, tuple((part.dtype, part.dim()) for part in parts)
    if kind in proved or any(part.is_meta for part in parts):
        return None
    proved.add(kind)

    def refused(error: Exception) -> str:
        shown = f"({type(error).__name__}: {first_line(error):.80})"
        if parameter.requires_grad:
            return f"which cannot be copied {shown}, and {trains}"
        return f"which cannot be rebuilt from copies of its tensors {shown}."

    # a tensor subclass may raise any error for operators that it does not support
    return result_or(lambda: _difference(owner, parameter), refused)


def _difference(owner: nn.Module, parameter: nn.Parameter) -> str | None:
    """Compare a quantized weight with its copy; return the difference as text, or ``None`` if they are equal."""
    if parameter.requires_grad:  # a weight that trains is copied by its class, and not rebuilt
        with torch.no_grad():
            torch.empty_like(parameter).copy_(parameter)
        return None
    copy = Rebuilding(lambda tensor: plain_numbers(tensor).clone()).parameter(parameter)
    before, after = parts_of([parameter]), parts_of([copy])
    if type(copy) is not type(parameter) or vars(copy).keys() != vars(parameter).keys():
        return "which is of another class, or has other attributes, when it is rebuilt from copies of its tensors."
    if len(before) != len(after) or not all(map(_is_equal, after, before)):
        return "which has different values when it is rebuilt from copies of its tensors."
    if _reached(vars(copy)) & _reached(vars(parameter)):
        return "which stores tensors where the pipeline does not find them, so a copy would read host tensors."
    if isinstance(owner, nn.Linear):
        dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
        given = torch.linspace(-1, 1, 2 * owner.in_features, dtype=dtype).reshape(2, owner.in_features)
    elif isinstance(owner, nn.Embedding):
        given = torch.arange(min(8, owner.num_embeddings))
    else:
        return None  # other modules are compared when a model is split
    forward: Any = type(owner).forward
    with weights_kept(owner), torch.no_grad():
        # a layer that raises an error with its own weight needs another device, and cannot be compared on the host
        expected = result_or(lambda: forward(owner, given), lambda error: None)
    if expected is None:
        return None
    rebuilding, own = Rebuilding(lambda tensor: plain_numbers(tensor).clone()), dict(owner._parameters)
    with weights_kept(owner), torch.no_grad():
        try:
            for name, value in own.items():
                if value is parameter:
                    owner._parameters[name] = rebuilding.parameter(parameter)
            for slot in states_of(owner):
                vars(owner)[slot.name] = rebuilding.state(slot.value)
            found = forward(owner, given)
        finally:
            owner._parameters.update(own)
    return None if _is_equal(found, expected) else f"with whose copy {type(owner).__name__} computes different values."


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = plain_numbers(one), plain_numbers(other)
    return one.dtype == other.dtype and one.shape == other.shape and bool(same_numbers(one, other))


def _reached(value: object) -> set[int]:
    """Return the ids of all tensors to which an object refers, also indirectly and through ``__slots__``."""
    found: set[int] = set()
    seen: dict[int, object] = {}
    waiting: list[object] = [value]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _NOT_ENTERED):
            continue
        seen[id(one)] = one
        if isinstance(one, torch.Tensor):
            found.add(id(one))
        else:
            waiting += gc.get_referents(one)
    return found


def same_numbers(copy: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():  # not detached, because a virtual device counts a view of a host tensor as its memory
        if copy.device.type == "cpu" and torch.equal(copy, source):
            return torch.ones((), dtype=torch.bool)
        return ((copy == source) | (copy.isnan() & source.isnan())).all()


def has_few_bits(module: nn.Module) -> bool:
    return any(p is not None and is_composite(p) for p in module._parameters.values()) or bool(states_of(module))


@contextlib.contextmanager
def weights_kept(model: nn.Module) -> Iterator[None]:
    """Restore quantized weights, and the related state of their modules, at the end of the with block."""
    # Linear4bit of bitsandbytes repacks its weight in evaluation mode on a CPU, and the repacked weight has no gradient
    # in training. Inside the block, modules hold new objects that share the memory of the weights.
    with contextlib.ExitStack() as stack:
        rebuilding = Rebuilding(plain_numbers)
        for module in filter(has_few_bits, model.modules()):
            states = states_of(module)
            stack.callback(vars(module).update, {slot.name: slot.value for slot in states})
            for name, parameter in module._parameters.items():
                if parameter is not None and is_composite(parameter):
                    stack.callback(module._parameters.__setitem__, name, parameter)
                    numbers = None if is_wrapper(parameter) else plain_numbers(parameter)
                    stack.callback(_restore, parameter, numbers, dict(vars(parameter)))
                    vars(parameter).update(vars(rebuilding.parameter(parameter)))
            vars(module).update({slot.name: rebuilding.state(slot.value) for slot in states})
        yield


def _restore(parameter: nn.Parameter, numbers: torch.Tensor | None, before: dict[str, Any]) -> None:
    if numbers is not None:
        now = plain_numbers(parameter)
        if (now.data_ptr(), now.shape, now.dtype) != (numbers.data_ptr(), numbers.shape, numbers.dtype):
            parameter.data = numbers
    vars(parameter).clear()
    vars(parameter).update(before)
