"""Copy settings of the caller's thread to the threads that run layers, and detect changes of code between calls."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from yobx_flatten.core.interrupts import Undoing
from yobx_flatten.core.private_names import of_torch

_DEPTH = 4  # nested function calls that the search for thread locals follows
_LIBRARIES = frozenset({"torch", *sys.stdlib_module_names})  # their thread locals are internal to them


@dataclasses.dataclass(frozen=True, slots=True)
class CallerState:
    """Autocast, torch modes and thread locals of the caller's thread, to be set in the threads that run layers."""

    autocast: Sequence[dict[str, Any]] = ()  # arguments for `torch.autocast`
    functions: Sequence[Any] = ()  # torch function modes, the outermost first
    dispatch: Sequence[Any] = ()  # torch dispatch modes, the outermost first
    values: Sequence[tuple[threading.local, dict[str, Any]]] = ()  # thread locals that layers read, and their values

    @classmethod
    def captured(cls, device_types: Sequence[str], code: Iterable[object]) -> CallerState:
        kinds, cached = filter(torch.is_autocast_enabled, device_types), torch.is_autocast_cache_enabled()
        autocast = [{"device_type": k, "dtype": torch.get_autocast_dtype(k), "cache_enabled": cached} for k in kinds]
        values = [(one, dict(vars(one))) for one in {local: None for part in code for local in _locals_of(part)}]
        held = [(one, found) for one, found in values if found]
        return cls(autocast, of_torch.function_modes(), of_torch.dispatch_modes(), held)

    def __bool__(self) -> bool:
        return bool(self.autocast or self.functions or self.dispatch or self.values)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for local, found in self.values:
                own = vars(local)
                stack.callback(own.update, dict(own))
                stack.callback(own.clear)  # callbacks run in reverse order
                own.update(found)
            for mode in self.autocast:
                stack.enter_context(torch.autocast(**mode))
            for one in self.functions:  # without `with`: the `__enter__` of a mode may reset the mode
                of_torch.push_function_mode(one)
                stack.callback(of_torch.pop_function_mode)
            for one in self.dispatch:
                of_torch.push_mode(one)
                stack.callback(of_torch.pop_mode)
            yield


def gradient_mode_kept() -> Undoing:
    # `torch.no_grad()` does not restore the mode if Ctrl-C is pressed while it is entered
    return Undoing(functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()))


_OF_CLASSES: weakref.WeakKeyDictionary[type, tuple[threading.local, ...]] = weakref.WeakKeyDictionary()


def _locals_of(code: object) -> list[threading.local]:
    found: list[threading.local] = []
    for part in code.modules() if isinstance(code, nn.Module) else [code]:
        kind = type(part)
        if kind not in _OF_CLASSES:
            functions = [f for one in kind.__mro__ if _is_own(one.__module__) for f in vars(one).values()]
            _OF_CLASSES[kind] = tuple(_named([f for f in functions if inspect.isfunction(f)]))
        found += _OF_CLASSES[kind]
        found += [value for value in getattr(part, "__dict__", {}).values() if isinstance(value, threading.local)]
        if not isinstance(part, nn.Module):
            found += _named([function_of(part)])
        elif "forward" in vars(part):
            found += _named([function_of(part.forward)])
    return found


def function_of(value: object) -> object:
    """Return the function of a bound method or of a ``functools.partial``; other values are returned unchanged."""
    while isinstance(value, functools.partial):
        value = value.func
    return getattr(value, "__func__", value)


def _is_own(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in _LIBRARIES


def _named(functions: Sequence[object]) -> list[threading.local]:
    found: dict[threading.local, None] = {}
    seen: set[types.CodeType] = set()
    waiting = [(function, 0) for function in functions]
    while waiting:
        function, depth = waiting.pop()
        if not isinstance(function, types.FunctionType) or function.__code__ in seen or depth > _DEPTH:
            continue
        seen.add(function.__code__)
        for value in values_of(function):
            if isinstance(value, threading.local):
                found[value] = None
            elif isinstance(value, types.FunctionType) and _is_own(value.__module__):
                waiting.append((value, depth + 1))
            elif not isinstance(value, type | types.ModuleType | types.FunctionType):
                held = [one for one in getattr(value, "__dict__", {}).values() if isinstance(one, threading.local)]
                found |= dict.fromkeys(held)
                if _is_own(type(value).__module__):
                    waiting += [(one, depth + 1) for one in vars(type(value)).values()]
    return list(found)


def values_of(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values that a function uses: its closure, its defaults, globals, and attributes of Python modules."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    codes = [function.__code__]
    for code in codes:  # inner functions are appended in the loop
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            if not isinstance(value, types.ModuleType | None):
                yield value
            elif value is not None and _is_own(value.__name__):
                yield from (vars(value)[one] for one in code.co_names if one in vars(value))


# Decide which calls are checked: calls 1, 2, 4, 8, ..., and those after a change of the code. So a change is found, at
# almost no cost over a whole training.


def is_due(count: int) -> bool:
    """Return whether a check that runs in calls 1, 2, 4, 8 ... is due in the next call, after ``count`` calls.

    >>> [count + 1 for count in range(20) if is_due(count)]
    [1, 2, 4, 8, 16]
    """
    return (count + 1) & count == 0


# A check follows each of the first 8 changes, later only the 16th, 32nd, ...: some attributes change in every call.
_CHANGES = 8
_PLAIN = frozenset({bool, int, float, str, type(None)})


class Repeats:
    """Decides when a check of layers or of a loss function is repeated, by counting calls and detecting changes."""

    def __init__(self) -> None:
        self._calls: collections.Counter[Hashable] = collections.Counter()
        self._changes: collections.Counter[Hashable] = collections.Counter()
        self._states: dict[Hashable, Hashable] = {}
        self._open: dict[Hashable, object] = {}  # code of this call

    def is_due(self, kind: Hashable, code: object = None) -> bool:
        # changes that a call makes itself, such as a counter, are part of the state at its end
        state = state_of(code)
        is_changed = self._states.get(kind, state) != state
        self._open[kind] = code
        self._changes[kind] += is_changed
        self._calls[kind] += 1
        changes = self._changes[kind]
        return is_due(self._calls[kind] - 1) or (is_changed and (changes <= _CHANGES or is_due(changes - 1)))

    def failed(self, kind: Hashable) -> None:
        self._calls[kind] = 0  # the next call of this kind is checked again

    def end(self) -> None:
        self._states |= {kind: state_of(code) for kind, code in self._open.items()}
        self._open.clear()


def state_of(code: object) -> Hashable:
    """Return fingerprints of the numbers, strings and tensors that layers or a loss read, to detect changes."""
    found: list[Hashable] = []
    values, is_read = [*code] if isinstance(code, list) else [code], False
    for value in values:  # grows in the loop
        if isinstance(value, functools.partial):
            values += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.MethodType):
            values += [value.__func__, value.__self__]
        elif isinstance(value, types.FunctionType) and not is_read:
            values += values_of(value)
            is_read = True
        else:
            found.append(_mark(value))
            for one in value.modules() if isinstance(value, nn.Module) else [value]:
                attributes = getattr(one, "__dict__", None)
                if type(attributes) is not dict or isinstance(one, torch.Tensor):
                    continue
                for name, held in attributes.items():
                    if type(held) in _PLAIN:
                        found.append((name, held))
                    elif isinstance(held, torch.Tensor):
                        found.append((name, _mark(held)))
                if isinstance(one, nn.Module):
                    found += map(_mark, attributes.get("_buffers", {}).values())
    return tuple(found)


def _mark(value: object) -> Hashable:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor) and not value.is_inference():
        return id(value), value._version
    return id(value)
