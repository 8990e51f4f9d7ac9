"""When to repeat the check of a kind of call: at calls 1, 2, 4, 8, ..., and when an attribute has changed."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Hashable, Iterator

import torch
from torch import nn

from .caller_state import values_of
from .looks import is_due

# Changes that are followed at once; after them, the 16th, the 32nd, ...: some attributes change in every call.
_CHANGES = 8

_PLAIN = frozenset({bool, int, float, str, type(None)})


class Repeats:
    """Counts calls by kind, and compares the user's objects at the start of a call with the end of the last call."""

    def __init__(self) -> None:
        self._calls: collections.Counter[Hashable] = collections.Counter()
        self._changes: collections.Counter[Hashable] = collections.Counter()
        self._states: dict[Hashable, Hashable] = {}
        self._open: dict[Hashable, object] = {}  # code of this call

    def is_due(self, kind: Hashable, code: object = None) -> bool:
        """Count a call of some code, as in :func:`state_of`; report whether the check must be repeated."""
        # what calls change themselves, such as a counter, is in the state of their end
        state = state_of(code)
        is_changed = self._states.get(kind, state) != state
        self._open[kind] = code
        self._changes[kind] += is_changed
        self._calls[kind] += 1
        changes = self._changes[kind]
        return is_due(self._calls[kind] - 1) or (is_changed and (changes <= _CHANGES or is_due(changes - 1)))

    def end(self) -> None:
        """Record the state of the code at the end of a call."""
        self._states |= {kind: state_of(code) for kind, code in self._open.items()}
        self._open.clear()


def state_of(code: object) -> Hashable:
    """Return marks of the numbers, texts and tensors that layers or a loss function read, to see changes."""
    # of a function: its closure, defaults, globals, and attributes of modules of the user's
    found: list[Hashable] = []
    values, is_read = [*code] if isinstance(code, list) else [code], False
    for value in values:  # grows
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
                found += _held(one)
    return tuple(found)


def _held(value: object) -> Iterator[Hashable]:
    """The attributes of an object that are numbers, texts or tensors."""
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is dict and not isinstance(value, torch.Tensor):
        for name, one in attributes.items():
            if type(one) in _PLAIN:
                yield name, one
            elif isinstance(one, torch.Tensor):
                yield name, _mark(one)
        for buffer in attributes.get("_buffers", {}).values() if isinstance(value, nn.Module) else ():
            yield _mark(buffer)


def _mark(value: object) -> Hashable:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor) and not value.is_inference():
        return id(value), value._version
    return id(value)
