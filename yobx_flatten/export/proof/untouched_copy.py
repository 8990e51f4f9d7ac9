"""Copy the arguments of a call with attributes that flatten does not see, for the reference call of a proof.

Flattened and unflattened, they would be what the program is given, and what is lost on the way would be lost on both
sides of the comparison.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from ...errors.failures import result_or

__all__ = ["untouched_copy"]

T = TypeVar("T")


def untouched_copy(value: T, module: torch.nn.Module) -> T:
    """Copy an object with all of its attributes; the module, where it is one of them, is shared."""
    shared: dict[int, Any] = {id(part): part for part in (*module.modules(), *module.parameters(), *module.buffers())}
    return _copied(value, shared)  # type: ignore[no-any-return] # of the same class


def _copied(value: Any, shared: Mapping[int, Any]) -> Any:
    # a class raises what it likes for what it holds: a lock, a file, a stream of a device
    return result_or(lambda: copy.deepcopy(value, dict(shared)), lambda error: _copied_by_parts(value, shared))


def _copied_by_parts(value: Any, shared: Mapping[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):  # computed from one that requires a gradient
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(_copied(item, shared) for item in value)
    if type(value) is dict:
        return {key: _copied(item, shared) for key, item in value.items()}
    attributes = getattr(value, "__dict__", None)
    if not attributes:
        return value  # the lock itself
    made = copy.copy(value)
    made.__dict__.update({name: _copied(held, shared) for name, held in attributes.items()})
    return made
