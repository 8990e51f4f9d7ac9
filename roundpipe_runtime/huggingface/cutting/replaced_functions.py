"""Let functions that were set on modules, such as a replaced ``forward``, call the copy of a copied module.

``copy.deepcopy`` copies methods with their object, but keeps functions, whose closures hold the modules they were made
for::

    original = model.forward                       # a method of the model, in a closure
    def forward(*args, **kwargs): return original(*args, **kwargs)
    model.forward = forward
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from torch import nn


def rebind_functions(copied: nn.Module, copies: Mapping[int, Any]) -> None:
    """Let functions that were set on the modules of a copy hold its modules, where they held those of the model."""
    made: dict[int, Any] = {}
    for module in copied.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, (types.FunctionType, types.MethodType)):
                module.__dict__[name] = _rebound(value, copies, made)


def _rebound(value: Any, copies: Mapping[int, Any], made: dict[int, Any]) -> Any:
    """The value with copies in place of modules; the value itself, if it holds none."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, types.MethodType):
        function, owner = _rebound(value.__func__, copies, made), _rebound(value.__self__, copies, made)
        is_same = function is value.__func__ and owner is value.__self__
        return value if is_same else types.MethodType(function, owner)
    if not isinstance(value, types.FunctionType):
        return value
    if id(value) not in made:
        made[id(value)] = value  # a function whose closure holds itself is looked at once
        made[id(value)] = _function(value, copies, made)
    return made[id(value)]


def _function(value: types.FunctionType, copies: Mapping[int, Any], made: dict[int, Any]) -> types.FunctionType:
    cells = [_cell(cell, copies, made) for cell in value.__closure__ or ()]
    if all(new is old for new, old in zip(cells, value.__closure__ or (), strict=True)):
        return value
    new = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
    new.__kwdefaults__, new.__qualname__ = value.__kwdefaults__, value.__qualname__
    new.__module__, new.__doc__ = value.__module__, value.__doc__
    new.__dict__.update(value.__dict__)  # such as ``__wrapped__``, which has the signature
    return new


def _cell(cell: types.CellType, copies: Mapping[int, Any], made: dict[int, Any]) -> types.CellType:
    """The cell itself, unless it holds a module: what a function counts in a cell is counted once."""
    try:
        held = cell.cell_contents
    except ValueError:  # not set yet
        return cell
    new = _rebound(held, copies, made)
    return cell if new is held else types.CellType(new)
