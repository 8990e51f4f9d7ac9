"""Detect changes of the wrapped model between calls, and copy step functions with the values of their variables."""

from __future__ import annotations

import contextlib
import dis
import functools
import operator
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from yobx_flatten.core.interrupts import Undoing

# These attributes are not compared: parameters and buffers are read in each run, and hooks are shared with copies.
_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "forward"})

_NUMBERS = (int, float, complex)
_PLAIN = (bool, str, bytes, type(None), torch.dtype, torch.device)
_LISTS = (list, tuple, set, frozenset, deque)

# transformers and PEFT write these names to configurations when a model is saved.
_NOTED = frozenset({"architectures", "dtype", "torch_dtype", "base_model_name_or_path", "auto_mapping"})

# Limits for the search in nested attributes: depth, and number of attributes.
_DEEPEST, _MOST = 4, 2000


class OtherForward:
    """A function that a pipeline temporarily sets as the ``forward`` of a model."""

    def __init__(self, forward: Callable[..., Any], before: Any) -> None:
        self.forward = forward
        self.before = before  # function that was set on the model before; `None` if no function was set

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


def own_forward(module: nn.Module) -> Any:
    found = module.__dict__.get("forward")
    while isinstance(found, OtherForward):
        found = found.before
    return found


@contextlib.contextmanager
def with_own_forwards(model: nn.Module) -> Iterator[None]:
    held = [(vars(module), vars(module).get("forward")) for module in model.modules()]
    taken = [(own, forward) for own, forward in held if isinstance(forward, OtherForward)]

    def restore() -> None:
        for own, forward in taken:
            own["forward"] = forward

    with (undoing := Undoing(restore)), undoing:
        for own, forward in taken:
            if forward.before is None:
                del own["forward"]
            else:
                own["forward"] = forward.before
        yield


class ModelReading:
    """A record of a model's modules, functions and attributes, and of its layers, to detect later changes."""

    # Modules, their classes and their `forward` functions are compared by identity. The pipeline runs copies of the
    # modules outside the layers, so their attributes and parameter names are also compared. The record references the
    # objects, so that a new object cannot have the address of an old object.

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        self._objects: list[object] = []
        self._values: list[object] = []
        self._left = _MOST
        self._seen: set[int] = set()
        inside = {id(layer): layer for layer in layers}
        waiting: list[nn.Module | None] = [model]
        outside: set[int] = set()
        while waiting:  # modules outside of the layers
            module = waiting.pop()
            if module is None or id(module) in inside or id(module) in outside:
                continue
            outside.add(id(module))
            held = module.__dict__
            self._objects += [module, type(module), own_forward(module), *held["_modules"].values()]
            names = [name for name in held if name not in _OF_EVERY_MODULE and not name.startswith("_rp_")]
            parameters = [name for name, parameter in held["_parameters"].items() if parameter is not None]
            self._values += [names, parameters, list(held["_modules"])]
            for name in names:
                value = held[name]
                # numbers and tensors may change, as they are set on the copies in each call
                if isinstance(value, (*_NUMBERS, torch.Tensor)) and not isinstance(value, bool):
                    self._values.append(type(value))
                else:
                    self._add(value, 0, with_numbers="config" not in name)
            waiting += held["_modules"].values()
        add, seen = self._objects.append, self._seen
        waiting += reversed(inside.values())
        while waiting:
            add(module := waiting.pop())
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            add(type(module))
            if "forward" in module.__dict__:
                add(own_forward(module))
            waiting += module.__dict__["_modules"].values()

    def matches(self, other: ModelReading) -> bool:
        one, two = self._objects, other._objects
        return len(one) == len(two) and all(map(operator.is_, one, two)) and self._values == other._values

    def _add(self, value: object, depth: int, *, with_numbers: bool) -> None:
        if isinstance(value, (*_PLAIN, *_NUMBERS)):
            is_compared = with_numbers or isinstance(value, _PLAIN)
            self._values.append(value if is_compared else type(value))
            return
        self._objects.append(type(value))
        if not isinstance(value, (dict, *_LISTS)):
            self._objects.append(value)
        if depth >= _DEEPEST or self._left <= 0 or id(value) in self._seen:
            return
        held = _held_by(value, frozenset() if with_numbers else _NOTED)
        self._left -= len(held)
        if held:
            self._seen.add(id(value))
        for one in held:
            self._add(one, depth + 1, with_numbers=with_numbers)


def _held_by(value: object, without: Set[str] = frozenset()) -> Sequence[object]:
    # without: names of attributes that are left out
    if isinstance(value, dict):
        return [one for item in value.items() for one in item]
    if isinstance(value, _LISTS):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, (nn.Module, torch.Tensor, type, types.FunctionType, types.BuiltinFunctionType)):
        return ()
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict):
        return ()
    return [one for name, attribute in held.items() if name not in without for one in (name, attribute)]


def tensors_held(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors in attributes of a module, including nested objects, but not the tensors of submodules."""
    waiting = [(value, 0) for name, value in module.__dict__.items() if name not in _OF_EVERY_MODULE]
    seen: set[int] = set()
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif id(value) not in seen and depth <= _DEEPEST and len(seen) < _MOST:
            seen.add(id(value))
            waiting += [(one, depth + 1) for one in _held_by(value)]


def changed_layers(before: Mapping[str, nn.Module], now: Mapping[str, nn.Module]) -> str | None:
    if [*map(id, before.values())] == [*map(id, now.values())] and [*before] == [*now]:
        return None
    held, there = set(map(id, before.values())), set(map(id, now.values()))
    texts = [f"{name} ({type(one).__name__}) was removed" for name, one in before.items() if id(one) not in there]
    texts += [f"{name} ({type(one).__name__}) was added" for name, one in now.items() if id(one) not in held]
    if not texts:
        texts = [f"{', '.join(name for name, one in before.items() if now.get(name) is not one)} were moved"]
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


# A step function that runs in the background must read the variables of the time of the call:
#
#     for step in range(100):
#         optimizer = first if step % 2 else second            # otherwise the lambda would read the next optimizer
#         model.step(lambda: optimizer.step(), is_async="exact")

_WRITES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"})


def bound_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function, with the current values of the global and closure variables that the function reads."""
    # a function that assigns global or closure variables is returned unchanged: other code reads the new values
    return _bound(function, {}, {}) if isinstance(function, types.FunctionType) else function


def _bound(
    function: types.FunctionType, spaces: dict[int, dict[str, Any]], done: dict[int, types.FunctionType]
) -> types.FunctionType:
    # spaces: one copy of the globals of each module; done: bound functions of this call, by identity
    key = id(function)
    if key in done:
        return done[key]
    done[key] = function  # the function may call itself
    if _writes(function.__code__):
        return function
    space = spaces.setdefault(id(function.__globals__), dict(function.__globals__))
    for name in _names(function.__code__):
        found = space.get(name)
        if isinstance(found, types.FunctionType) and found.__globals__ is function.__globals__:
            space[name] = _bound(found, spaces, done)
    cells = []
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # a name that has no value yet
            cells.append(cell)
        else:
            is_function = isinstance(value, types.FunctionType)
            cells.append(types.CellType(_bound(value, spaces, done) if is_function else value))
    made = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, tuple(cells))
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    done[key] = made
    return made


def _codes(code: types.CodeType) -> list[types.CodeType]:
    return [code, *(one for inner in code.co_consts if isinstance(inner, types.CodeType) for one in _codes(inner))]


@functools.lru_cache(256)
def _names(code: types.CodeType) -> set[str]:
    return {name for one in _codes(code) for name in one.co_names}


@functools.lru_cache(256)
def _writes(code: types.CodeType) -> bool:
    """Return whether a function assigns a global variable, or a variable of an enclosing function."""
    inner = {name for one in _codes(code) for name in one.co_cellvars}  # own variables that inner functions share
    return any(
        step.opname in _WRITES and (step.opname.endswith("GLOBAL") or step.argval not in inner)
        for one in _codes(code)
        for step in dis.get_instructions(one)
    )
