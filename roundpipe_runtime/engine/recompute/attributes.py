"""Restore a layer's Python attributes, such as a queue of features, before its recomputation.

::

    forward 0        queue []         -> [a]
    forward 1        queue [a]        -> [a, b]
    recomputation 0  queue [] (kept)  -> [a], and [a, b] is put back

Buffers are copied with the layer and handled elsewhere, and parameters may not be written.
"""

from __future__ import annotations

import collections
import copy
import sys
from typing import Any

import torch
from torch import nn

_OF_TORCH = frozenset(vars(nn.Module()))
_CONTAINERS = (dict, list, set, collections.deque)

_LIBRARIES = frozenset({"torch", "transformers", "roundpipe_runtime", "yobx_flatten", *sys.stdlib_module_names})

# Containers in containers that are entered; an attribute may lead to a whole trainer.
_DEPTH = 3


class LayerAttributes:
    """The attributes of a layer and of what they hold, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._tables: list[tuple[str, dict[str, Any], dict[str, Any]]] = []  # path, attributes, their values
        self._containers: list[tuple[str, Any, Any]] = []  # path, container, a copy
        self._tensors: list[tuple[str, torch.Tensor, int, torch.Tensor]] = []  # path, tensor, version, a copy
        seen: set[int] = set()
        for name, part in module.named_modules():
            path = f"{name}." if name else ""
            held = {key: value for key, value in vars(part).items() if key not in _OF_TORCH}
            self._tables.append((path, vars(part), held))
            for key, value in held.items():
                self._note(f"{path}{key}", value, seen, _DEPTH)

    def _note(self, path: str, value: Any, seen: set[int], depth: int) -> None:
        if id(value) in seen or not depth:
            return
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter) and not value.is_inference() and value.layout == torch.strided:
                seen.add(id(value))
                self._tensors.append((path, value, value._version, value.detach().clone()))
            return
        held: Any = None
        if type(value) in _CONTAINERS or isinstance(value, (dict, list)):
            self._containers.append((path, value, copy.copy(value)))
            held = value.items() if isinstance(value, dict) else enumerate(value)
        elif _is_own(value) and type(getattr(value, "__dict__", None)) is dict:
            self._tables.append((f"{path}.", vars(value), dict(vars(value))))
            held = vars(value).items()
        seen.add(id(value))
        for key, one in held or ():
            self._note(f"{path}[{key!r}]", one, seen, depth - 1)

    def changes(self) -> list[str]:
        """Return the paths of what was changed since."""
        found = []
        for path, now, before in self._tables:
            own = _OF_TORCH if "_parameters" in now else frozenset()
            names = [name for name in {**before, **now} if name not in own]
            found += [path + name for name in names if name not in now or now[name] is not before.get(name, _OF_TORCH)]
        found += [path for path, value, before in self._containers if not _is_alike(value, before)]
        return found + [path for path, tensor, version, _ in self._tensors if tensor._version != version]

    def restore(self) -> None:
        """Restore everything that was noted."""
        for _, now, before in self._tables:
            own = _OF_TORCH if "_parameters" in now else frozenset()
            for name in [name for name in now if name not in own and name not in before]:
                del now[name]
            now.update(before)
        for _, value, before in self._containers:
            if not _is_alike(value, before):
                value.clear()
                is_sequence = isinstance(value, list | collections.deque)
                (value.extend if is_sequence else value.update)(before)
        with torch.no_grad():
            for _, tensor, version, numbers in self._tensors:
                if tensor._version != version:
                    tensor.copy_(numbers)


def _is_own(value: object) -> bool:
    """Whether an object is of a class of the user's: libraries and pipelines undo what they do themselves."""
    return not isinstance(value, nn.Module | type) and type(value).__module__.partition(".")[0] not in _LIBRARIES


def _is_alike(value: Any, before: Any) -> bool:
    """Whether a container has the same objects as a copy of it."""
    if isinstance(value, set):
        return bool(value == before)
    one, other = (list(held.items() if isinstance(held, dict) else enumerate(held)) for held in (value, before))
    return len(one) == len(other) and all(a is c and b is d for (a, b), (c, d) in zip(one, other, strict=True))
