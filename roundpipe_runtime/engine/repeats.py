"""When to show again what was shown of a kind of call: at calls 1, 2, 4, 8, ..., and when an attribute has changed."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Hashable, Iterable, Iterator

import torch
from torch import nn

from .caller_state import values_of
from .looks import is_due

# Changes that are followed at once; after them, the 16th, the 32nd, ...: some attributes change in every call.
_CHANGES = 8

_PLAIN = frozenset({bool, int, float, str, type(None)})
_OF_MODULES = frozenset(vars(nn.Module()))


class Repeats:
    """Counts calls by kind, and compares what the user's objects hold at the beginning of a call with the last end."""

    def __init__(self) -> None:
        self._calls: collections.Counter[Hashable] = collections.Counter()
        self._changes: collections.Counter[Hashable] = collections.Counter()
        self._states: dict[Hashable, Hashable] = {}

    def is_due(self, kind: Hashable, state: Hashable) -> bool:
        """Count a call; report whether something is to be shown again."""
        # what calls change themselves, such as a counter, is in the state of their end
        is_changed = kind in self._states and self._states[kind] != state
        self._changes[kind] += is_changed
        self._calls[kind] += 1
        changes = self._changes[kind]
        return is_due(self._calls[kind] - 1) or (is_changed and (changes <= _CHANGES or is_due(changes - 1)))

    def end(self, kind: Hashable, state: Hashable) -> None:
        """Note the state at the end of a call."""
        self._states[kind] = state


def state_of(code: object) -> Hashable:
    """Return marks of the numbers, texts and tensors that layers or a loss function read, to see changes."""
    return tuple(_state(code))


def _state(code: object) -> Iterator[Hashable]:
    while isinstance(code, functools.partial):
        yield from _marks([*code.args, *code.keywords.values()])
        code = code.func
    if isinstance(code, types.MethodType):
        yield from _marks([code.__self__])
        code = code.__func__
    if isinstance(code, types.FunctionType):
        yield from _marks(values_of(code))
    else:
        yield from _marks(code if isinstance(code, list) else [code])


def _marks(values: Iterable[object]) -> Iterator[Hashable]:
    for value in values:
        if isinstance(value, nn.Module):
            yield id(value)
            for module in value.modules():
                yield from _held(module)
        else:
            yield _mark(value)
            if not isinstance(value, torch.Tensor):
                yield from _held(value)


def _held(value: object) -> Iterator[Hashable]:
    """The attributes of an object that are numbers, texts or tensors."""
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is dict:
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
