"""Register classes with ``torch.utils._cxx_pytree``: optree's ``"torch"`` namespace and its pending list.

``torch.compile`` imports the module, usually long after a class was registered. Before the import, torch stores the
registrations in a pending list. torch's own deregistration ignores the list: an unregistered class is registered again
at the import, and a class that is in the list twice makes every later ``torch.compile`` in the process fail.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..errors.failures import undone_on_failure
from ..private_names import of_torch
from ..recipe.contract import Flatten, Recipe, Unflatten

_NAMESPACE = "torch"


class _Pending(NamedTuple):
    """An entry of the pending list, and its position."""

    place: int
    entry: tuple[tuple[Any, ...], dict[str, Any]]


class TorchCpp:
    """The classes in torch's C++ pytree: optree's namespace ``"torch"``, or torch's pending list before its import."""

    name = "torch_cpp"

    def read(self, cls: type) -> Any:
        """Return optree's entry of a class, or the pending one before torch imports optree, or ``None``."""
        if not of_torch.cxx_pytree_exists():
            return None
        with of_torch.NODE_REGISTRY_LOCK:
            if of_torch.cxx_pytree_is_imported():
                return registered(_NAMESPACE, cls)
            for place, entry in enumerate(of_torch.cxx_pytree_pending()):
                if entry[0][0] is cls:
                    return _Pending(place, entry)
            return None

    def write(self, recipe: Recipe) -> None:
        """Register a class with torch's C++ pytree, replacing the class's current registration."""
        if not of_torch.cxx_pytree_exists():
            return
        with of_torch.NODE_REGISTRY_LOCK:
            found = self.read(recipe.cls)
            if of_torch.cxx_pytree_is_imported():
                replace(found, _NAMESPACE, recipe.cls, lambda: _register(recipe.cls, recipe.flatten, recipe.unflatten))
            else:
                entry = (recipe.cls, recipe.flatten, recipe.unflatten), {"serialized_type_name": recipe.name}
                place = _drop_pending(recipe.cls, None)
                of_torch.cxx_pytree_pending().insert(sys.maxsize if place is None else place, entry)

    def restore(self, recipe: Recipe, found: object) -> None:
        """Restore the registration ``found``, which ``read`` returned before, also if optree was imported since."""
        if not of_torch.cxx_pytree_exists():
            return
        cls = recipe.cls
        with of_torch.NODE_REGISTRY_LOCK:
            if of_torch.cxx_pytree_is_imported():
                current = registered(_NAMESPACE, cls)
                if current is not None and current.flatten_func is not recipe.flatten:
                    return  # other code registered the class after us
                with order_kept(found):
                    if current is not None:
                        unregister(_NAMESPACE, cls)
                    if isinstance(found, _Pending):
                        _register(*found.entry[0])
                    else:
                        register_again(found)
                return
            place = _drop_pending(cls, recipe)
            if isinstance(found, _Pending) and self.read(cls) is None:
                of_torch.cxx_pytree_pending().insert(found.place if place is None else place, found.entry)


def _register(cls: type, flatten: Flatten, unflatten: Unflatten) -> None:
    # torch's own function swaps the arguments of `unflatten` for optree
    sys.modules["torch.utils._cxx_pytree"]._private_register_pytree_node(cls, flatten, unflatten)


def _drop_pending(cls: type, recipe: Recipe | None) -> int | None:
    """Remove a class, or only its entry made from ``recipe``, from the pending list; return the first position."""
    pending, place = of_torch.cxx_pytree_pending(), None
    for index in reversed(range(len(pending))):
        waiting, flatten, _ = pending[index][0]
        if waiting is cls and (recipe is None or flatten is recipe.flatten):
            del pending[index]
            place = index
    return place


def registered(namespace: str, cls: type) -> Any:
    """Return optree's entry of a class in a namespace, or ``None``; optree must be imported."""
    # optree's public function also returns entries of the global namespace
    return _table().get((namespace, cls))


def unregister(namespace: str, cls: type) -> None:
    """Unregister a class from a namespace of optree."""
    sys.modules["optree"].unregister_pytree_node(cls, namespace=namespace)


def register_again(found: Any) -> None:
    """Register a class with optree again, by an entry of :func:`registered`; do nothing for ``None``."""
    if found is not None:
        sys.modules["optree"].register_pytree_node(
            found.type,
            found.flatten_func,
            found.unflatten_func,
            path_entry_type=found.path_entry_type,
            namespace=found.namespace,
        )


def replace(found: Any, namespace: str, cls: type, register: Callable[[], object]) -> None:
    """Unregister a class, whose entry is ``found``, and call ``register``; an error restores the entry."""
    with order_kept(found):
        if found is not None:
            unregister(namespace, cls)
        with undone_on_failure(lambda: register_again(found)):
            register()


@contextlib.contextmanager
def order_kept(found: Any) -> Iterator[None]:
    """Restore the order of optree's classes after the with block, since optree can only append a class."""
    table = _table()
    order = list(table) if found is not None else []
    try:
        yield
    finally:
        if order and list(table) != order:
            for key in [key for key in order if key in table] + [key for key in table if key not in order]:
                table[key] = table.pop(key)


def _table() -> dict[Any, Any]:
    return sys.modules["optree.registry"]._NODETYPE_REGISTRY  # type: ignore[no-any-return] # a dict
