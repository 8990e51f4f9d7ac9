"""``torch.utils._cxx_pytree``: optree's "torch" namespace, and the list of classes that wait for its first import.

``torch.compile`` and dynamo import it, usually long after a class was registered. Until then torch keeps the
registrations in a pending list, which its own deregistration does not touch: a class taken away comes back, and one
registered twice makes every later ``torch.compile`` of the process fail.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch.utils._pytree as pytree

from ..recipe import Recipe

__all__ = ["TorchCpp"]

_NAMESPACE = "torch"


class _Pending(NamedTuple):
    """What waits for the first import: the entry itself and its place in the list."""

    place: int
    entry: tuple[tuple[Any, ...], dict[str, Any]]


class TorchCpp:
    """optree's "torch" namespace when it is imported, torch's pending list before."""

    name = "torch_cpp"

    def read(self, cls: type) -> Any:
        """Return the pending entry or optree's, or ``None``."""
        if not pytree._cxx_pytree_exists:
            return None
        with pytree._NODE_REGISTRY_LOCK:
            if pytree._cxx_pytree_imported:
                return _registered(cls)
            for place, entry in enumerate(pytree._cxx_pytree_pending_imports):
                if entry[0][0] is cls:
                    return _Pending(place, entry)
            return None

    def holds(self, recipe: Recipe) -> bool:
        """Tell whether the C++ side holds this recipe, or will once it is imported."""
        found = self.read(recipe.cls)
        if found is None:
            return not pytree._cxx_pytree_exists
        flatten = found.entry[0][1] if isinstance(found, _Pending) else found.flatten_func
        return flatten is recipe.flatten

    def write(self, recipe: Recipe) -> None:
        """Put the recipe in place of what is there."""
        if not pytree._cxx_pytree_exists:
            return
        with pytree._NODE_REGISTRY_LOCK:
            index = self._take_out(recipe.cls)
            self._put(((recipe.cls, recipe.flatten, recipe.unflatten), {"serialized_type_name": recipe.name}), index)

    def restore(self, recipe: Recipe, found: Any) -> None:
        """Bring back what was found, also when the C++ side was imported in between."""
        if not pytree._cxx_pytree_exists:
            return
        with pytree._NODE_REGISTRY_LOCK:
            current = self.read(recipe.cls)
            if current is not None and not self.holds(recipe):
                return  # somebody else registered the class after us
            self._take_out(recipe.cls)
            if isinstance(found, _Pending):
                self._put(found.entry, found.place)
            elif found is not None:
                sys.modules["optree"].register_pytree_node(
                    recipe.cls,
                    found.flatten_func,
                    found.unflatten_func,
                    path_entry_type=found.path_entry_type,
                    namespace=_NAMESPACE,
                )

    def _take_out(self, cls: type) -> int | None:
        """Remove the class wherever it is; return its place in the pending list."""
        if pytree._cxx_pytree_imported:
            if _registered(cls) is not None:
                sys.modules["optree"].unregister_pytree_node(cls, namespace=_NAMESPACE)
            return None
        pending, place = pytree._cxx_pytree_pending_imports, None
        for index in reversed(range(len(pending))):
            if pending[index][0][0] is cls:
                del pending[index]
                place = index
        return place

    def _put(self, entry: tuple[tuple[Any, ...], dict[str, Any]], index: int | None) -> None:
        if pytree._cxx_pytree_imported:
            args, kwargs = entry
            sys.modules["torch.utils._cxx_pytree"]._private_register_pytree_node(*args, **kwargs)
            return
        pending = pytree._cxx_pytree_pending_imports
        pending.insert(len(pending) if index is None else index, entry)


def _registered(cls: type) -> Any:
    # there is no public way to ask optree for one class of one namespace
    return sys.modules["optree.registry"]._NODETYPE_REGISTRY.get((_NAMESPACE, cls))
