"""Register classes with optree, in the namespace ``"yobx_flatten"``.

``optree.tree_flatten(tree, namespace="yobx_flatten")`` flattens what is registered here, and
``optree.tree_accessors(tree, namespace="yobx_flatten")[0].codify("inputs")`` states ``inputs['a'][0].x``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

from ..private_names.of_torch import GetAttrKey, KeyEntry, MappingKey, SequenceKey
from ..recipe.aliases import Static
from ..recipe.contract import Recipe
from .torch_cpp import order_kept, register_again, registered, unregister
from .waiting import Waiting

NAMESPACE = "yobx_flatten"


class Optree:
    """optree's namespace ``"yobx_flatten"``; before optree is imported, what waits for it."""

    name = "optree"

    def __init__(self) -> None:
        self.waiting = Waiting("optree", self._put)

    def read(self, cls: type) -> Any:
        """Return optree's entry or the recipe that waits, or ``None``."""
        with self.waiting.lock:
            return registered(NAMESPACE, cls) if self.waiting.library_is_there() else self.waiting.get(cls)

    def write(self, recipe: Recipe) -> None:
        """Register the recipe, replacing the current registration."""
        self.waiting.put(recipe)

    def restore(self, recipe: Recipe, found: object) -> None:
        """Restore the earlier registration, also if optree was imported in between."""
        with self.waiting.lock:
            if not self.waiting.library_is_there():
                self.waiting.drop(recipe)
                return
            current = registered(NAMESPACE, recipe.cls)
            if current is not None and _recipe_of(current) is not recipe:
                return  # other code registered the class after us
            with order_kept(found):
                if current is not None:
                    unregister(NAMESPACE, recipe.cls)
                register_again(found)

    def _put(self, recipe: Recipe) -> None:
        found = registered(NAMESPACE, recipe.cls)
        with order_kept(found):
            if found is not None:
                unregister(NAMESPACE, recipe.cls)
            try:
                _register(recipe)
            except BaseException:  # also Ctrl-C; raised again
                register_again(found)
                raise


def _register(recipe: Recipe) -> None:
    optree = sys.modules["optree"]
    optree.register_pytree_node(
        recipe.cls,
        functools.partial(_flatten, recipe) if recipe.has_keys else functools.partial(_flatten_by_position, recipe),
        functools.partial(_unflatten, recipe),
        path_entry_type=_entry_type() if recipe.has_keys else optree.FlattenedEntry,
        namespace=NAMESPACE,
    )


def _recipe_of(entry: object) -> Recipe | None:
    function = getattr(entry, "flatten_func", None)
    if isinstance(function, functools.partial) and function.func in (_flatten, _flatten_by_position):
        recipe: Recipe = function.args[0]
        return recipe
    return None


def _flatten(recipe: Recipe, obj: object) -> tuple[list[Any], Any, list[Any]]:
    pairs, static = recipe.flatten_with_keys(obj)
    return [child for _, child in pairs], static, [_entry(key) for key, _ in pairs]


def _flatten_by_position(recipe: Recipe, obj: object) -> tuple[list[Any], Any]:
    return recipe.flatten(obj)


def _unflatten(recipe: Recipe, static: Static, children: Iterable[Any]) -> Any:
    return recipe.unflatten(list(children), static)


class _Attribute(str):
    """The entry of a child that is an attribute; a path shows it as the plain name."""

    __slots__ = ()


class _Index(int):
    """The entry of a child that has a position; a path shows it as the plain number."""


def _entry(key: KeyEntry) -> Any:
    """The key as optree shows it in a path, with what :func:`_entry_type` needs to know about it."""
    if isinstance(key, GetAttrKey):
        return _Attribute(key.name)
    if isinstance(key, SequenceKey):
        return _Index(key.idx)
    return key.key if isinstance(key, MappingKey) else key


@functools.cache
def _entry_type() -> Any:
    """The one entry class that optree takes per class; each child gets the kind that its own key states."""
    optree = sys.modules["optree"]

    class KeyedEntry(optree.PyTreeEntry):  # type: ignore[misc,name-defined] # optree counts as untyped
        def __new__(cls, entry: object, type: type, kind: Any) -> Any:
            if isinstance(entry, _Attribute):
                return optree.GetAttrEntry(str(entry), type, kind)
            if isinstance(entry, _Index):
                return optree.SequenceEntry(int(entry), type, kind)
            return optree.MappingEntry(entry, type, kind)

    return KeyedEntry
