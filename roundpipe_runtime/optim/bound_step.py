"""Bind the names that a step function reads, as a thread runs it when the caller may have bound them anew.

::

    for step in range(100):
        optimizer = first if step % 2 else second            # the lambda below would read the next one
        model.step(lambda: optimizer.step(), is_async="exact")
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable
from typing import Any

_WRITES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"})


def bound_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the values that the names of its closure and its module have now.

    A function that binds such a name itself is returned as it is: others read what it writes.
    """
    return _Binding().bound(function) if isinstance(function, types.FunctionType) else function


class _Binding:
    """The functions of one call that were bound, and one copy of the names of each module."""

    def __init__(self) -> None:
        self._globals: dict[int, dict[str, Any]] = {}
        self._made: dict[int, types.FunctionType] = {}

    def bound(self, function: types.FunctionType) -> types.FunctionType:
        key = id(function)
        if key in self._made:
            return self._made[key]
        self._made[key] = function  # also while its own names are read, which may be its own
        if _writes(function.__code__):
            return function
        space = self._globals.setdefault(id(function.__globals__), dict(function.__globals__))
        for name in _names(function.__code__):
            found = space.get(name)
            if isinstance(found, types.FunctionType) and found.__globals__ is function.__globals__:
                space[name] = self.bound(found)
        cells = tuple(_bound_cell(cell, self) for cell in function.__closure__ or ())
        made = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells)
        made.__kwdefaults__ = function.__kwdefaults__
        made.__dict__.update(function.__dict__)
        self._made[key] = made
        return made


def _bound_cell(cell: types.CellType, binding: _Binding) -> types.CellType:
    try:
        found = cell.cell_contents
    except ValueError:  # a name that has no value yet
        return cell
    return types.CellType(binding.bound(found) if isinstance(found, types.FunctionType) else found)


def _codes(code: types.CodeType) -> list[types.CodeType]:
    return [code, *(one for inner in code.co_consts if isinstance(inner, types.CodeType) for one in _codes(inner))]


@functools.lru_cache(256)
def _names(code: types.CodeType) -> set[str]:
    return {name for one in _codes(code) for name in one.co_names}


@functools.lru_cache(256)
def _writes(code: types.CodeType) -> bool:
    """Whether a function binds a name of its module, or of the function around it."""
    inner = {name for one in _codes(code) for name in one.co_cellvars}  # names of its own, that functions in it share
    return any(
        step.opname in _WRITES and (step.opname.endswith("GLOBAL") or step.argval not in inner)
        for one in _codes(code)
        for step in dis.get_instructions(one)
    )
