"""Read and restore entries of optree's table of classes, one namespace at a time."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


def registered(namespace: str, cls: type) -> Any:
    """Return optree's entry for a class in one namespace, or ``None``; optree must be imported."""
    # there is no public way to ask for one namespace without the global one
    return _table().get((namespace, cls))


def unregister(namespace: str, cls: type) -> None:
    """Take a class out of a namespace."""
    sys.modules["optree"].unregister_pytree_node(cls, namespace=namespace)


def register_again(found: Any) -> None:
    """Register what optree held before, with the very same functions."""
    if found is not None:
        sys.modules["optree"].register_pytree_node(
            found.type,
            found.flatten_func,
            found.unflatten_func,
            path_entry_type=found.path_entry_type,
            namespace=found.namespace,
        )


@contextlib.contextmanager
def order_kept(found: Any) -> Iterator[None]:
    """Optree can only append; a class that was there before goes back to its place."""
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
