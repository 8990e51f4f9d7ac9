"""Register classes with optree and JAX, at once or, if the library is not imported yet, right after its import.

In optree, registered classes are in the namespace ``"yobx_flatten"``: ``optree.tree_flatten(tree,
namespace="yobx_flatten")`` flattens the registered classes, and ``optree.tree_accessors(tree,
namespace="yobx_flatten")[0].codify("inputs")`` returns ``inputs['a'][0].x``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from ..errors import AlreadyRegisteredError, describe_class
from ..errors.failures import result_or
from ..private_names.of_torch import GetAttrKey, KeyEntry, MappingKey, SequenceKey
from ..recipe.aliases import Static
from ..recipe.contract import Recipe, hashable, original
from .patches import LOCK, ImportHook
from .torch_tables import order_kept, register_again, registered, replace, unregister

NAMESPACE = "yobx_flatten"


class Optree:
    """Registers classes in optree's namespace ``"yobx_flatten"``, or stores the classes until optree is imported."""

    name = "optree"

    def __init__(self) -> None:
        self.waiting = Waiting("optree", self._put)

    def read(self, cls: type) -> Any:
        """Return a class's entry in optree, or the one to add when optree is imported; ``None`` if there is none."""
        with self.waiting.lock:
            return registered(NAMESPACE, cls) if self.waiting.library_is_there() else self.waiting.get(cls)

    def write(self, recipe: Recipe) -> None:
        self.waiting.put(recipe)

    def restore(self, recipe: Recipe, found: object) -> None:
        with self.waiting.lock:
            if not self.waiting.library_is_there():
                self.waiting.drop(recipe)
                return
            current = registered(NAMESPACE, recipe.cls)
            function = getattr(current, "flatten_func", None)
            is_ours = (
                isinstance(function, functools.partial)
                and function.func in (_flatten, _flatten_by_position)
                and function.args[0] is recipe
            )
            if current is not None and not is_ours:
                return  # other code registered the class after us
            with order_kept(found):
                if current is not None:
                    unregister(NAMESPACE, recipe.cls)
                register_again(found)

    def _put(self, recipe: Recipe) -> None:
        replace(registered(NAMESPACE, recipe.cls), NAMESPACE, recipe.cls, lambda: _register(recipe))


def _register(recipe: Recipe) -> None:
    optree = sys.modules["optree"]
    optree.register_pytree_node(
        recipe.cls,
        functools.partial(_flatten, recipe) if recipe.has_keys else functools.partial(_flatten_by_position, recipe),
        functools.partial(_unflatten, recipe),
        path_entry_type=_entry_type() if recipe.has_keys else optree.FlattenedEntry,
        namespace=NAMESPACE,
    )


def _flatten(recipe: Recipe, obj: object) -> tuple[list[Any], Any, list[Any]]:
    pairs, static = recipe.flatten_with_keys(obj)
    return [child for _, child in pairs], static, [_entry(key) for key, _ in pairs]


def _flatten_by_position(recipe: Recipe, obj: object) -> tuple[list[Any], Any]:
    return recipe.flatten(obj)


def _unflatten(recipe: Recipe, static: Static, children: Iterable[Any]) -> Any:
    return recipe.unflatten(list(children), static)


class _Attribute(str):
    """Entry of an optree path for a child that is an attribute; it is shown as the attribute's name."""

    __slots__ = ()


class _Index(int):
    """Entry of an optree path for a child in a sequence; it is shown as the child's index."""


def _entry(key: KeyEntry) -> Any:
    """Convert a torch key to a path entry for optree, whose class distinguishes attributes from indices."""
    if isinstance(key, GetAttrKey):
        return _Attribute(key.name)
    if isinstance(key, SequenceKey):
        return _Index(key.idx)
    return key.key if isinstance(key, MappingKey) else key


@functools.cache
def _entry_type() -> Any:
    """Return a class for optree that makes each child's path entry: an attribute, an index or a mapping key."""
    optree = sys.modules["optree"]

    class KeyedEntry(optree.PyTreeEntry):  # type: ignore[misc,name-defined] # optree counts as untyped
        def __new__(cls, entry: object, type: type, kind: Any) -> Any:
            if isinstance(entry, _Attribute):
                return optree.GetAttrEntry(str(entry), type, kind)
            if isinstance(entry, _Index):
                return optree.SequenceEntry(int(entry), type, kind)
            return optree.MappingEntry(entry, type, kind)

    return KeyedEntry


_THEIRS = "registered with JAX by other code"


# JAX cannot remove or replace the registration of a class, because compiled functions rely on the registration
# (https://github.com/jax-ml/jax/issues/21666). So the functions that are registered with JAX look up the recipe:
#
#     registered                      JAX uses the recipe
#     unregistered                    JAX continues to use the last recipe, so that compiled functions still work
#     registered again, same recipe   nothing is compiled again
#     registered again, new recipe    JAX uses the new recipe and compiles functions again; earlier tree definitions
#                                     continue to use the earlier recipe


class Jax:
    """Registers classes in JAX's pytree registry, or stores the classes until JAX is imported."""

    name = "jax"

    def __init__(self) -> None:
        self.waiting = Waiting("jax", self._put)
        self._nodes: dict[type, _Node] = {}  # entries are never removed, as in JAX

    def read(self, cls: type) -> Any:
        """Return a class's registered functions; ``_THEIRS`` if other code registered it with JAX; else ``None``."""
        with self.waiting.lock:
            if not self.waiting.library_is_there():
                return self.waiting.get(cls)
            node = self._nodes.get(cls)
            if node is not None:
                return node.in_force
            return _THEIRS if _is_node(cls) else None

    def write(self, recipe: Recipe) -> None:
        self.waiting.put(recipe)

    def restore(self, recipe: Recipe, found: object) -> None:
        """Mark the class as unregistered; JAX, which cannot unregister a class, continues to call its functions."""
        with self.waiting.lock:
            if not self.waiting.library_is_there():
                self.waiting.drop(recipe)
                return
            node = self._nodes.get(recipe.cls)
            if node is not None and node.in_force is recipe:
                node.in_force = None

    def _put(self, recipe: Recipe) -> None:
        node = self._nodes.get(recipe.cls)
        if node is not None:
            node.put(recipe)
            return
        node = _Node(recipe)
        try:
            sys.modules["jax"].tree_util.register_pytree_with_keys(
                recipe.cls, node.flatten_with_keys, node.unflatten, node.flatten
            )
        except ValueError as error:
            raise AlreadyRegisteredError(
                f"{describe_class(recipe.cls)} was registered with JAX by other code, and JAX cannot replace a "
                f"registration ({error})."
            ) from error
        self._nodes[recipe.cls] = node


class _Node:
    """Functions registered with JAX for one class, which call the flatten functions that the user registered last."""

    def __init__(self, recipe: Recipe) -> None:
        self.in_force: Recipe | None = recipe
        self._recipes = [recipe]
        self._current = (0, recipe)  # one tuple, so that another thread never reads a number with a different recipe

    def put(self, recipe: Recipe) -> None:
        """Make JAX flatten the class with the functions in ``recipe`` instead of the earlier functions."""
        same = (i for i, known in enumerate(self._recipes) if known.same_functions(recipe))
        number = next(same, len(self._recipes))
        self._recipes[number : number + 1] = [recipe]
        self._current, self.in_force = (number, recipe), recipe

    def flatten(self, obj: object) -> tuple[list[Any], Any]:
        number, recipe = self._current
        children, static = recipe.flatten(obj)
        return children, _aux(number, static)

    def flatten_with_keys(self, obj: object) -> tuple[list[tuple[Any, Any]], Any]:
        number, recipe = self._current
        pairs, static = recipe.flatten_with_keys(obj)
        return [(_jax_key(key), child) for key, child in pairs], _aux(number, static)

    def unflatten(self, aux: Static, children: Iterable[Any]) -> Any:
        number, static = (aux.number, aux.static) if type(aux) is _Later else (0, aux)
        return self._recipes[number].unflatten(list(children), original(static))


@dataclasses.dataclass(frozen=True, slots=True)
class _Later:
    """Static data that a second or later registration of a class made, and the number of the registration."""

    number: int
    static: Any


def _aux(number: int, static: Static) -> Any:
    aux = hashable(static)
    return _Later(number, aux) if number else aux


def _is_node(cls: type) -> bool:
    tree_util = sys.modules["jax"].tree_util
    if hasattr(tree_util, "is_tree_node"):
        return bool(tree_util.is_tree_node(cls))
    # older versions of JAX have no public function for this
    return cls in sys.modules["jax._src.tree_util"]._registry


def _jax_key(key: KeyEntry) -> Any:
    tree_util = sys.modules["jax"].tree_util
    if isinstance(key, GetAttrKey):
        return tree_util.GetAttrKey(key.name)
    if isinstance(key, SequenceKey):
        return tree_util.SequenceKey(key.idx)
    return tree_util.DictKey(key.key) if isinstance(key, MappingKey) else key


logger = logging.getLogger("yobx_flatten")


class Waiting:
    """Classes, with their flatten functions, to be registered with a library when the library is imported."""

    # deliver: registers one recipe with the library; called while `lock` is held
    # lock: a backend holds the lock from its check of the library until its change is done, so that no other thread
    # imports the library between the two

    def __init__(self, library: str, deliver: Callable[[Recipe], None]) -> None:
        self._library, self._deliver = library, deliver
        self._recipes: dict[type, Recipe] = {}
        self._hook = ImportHook(lambda name: name == library, self._imported)
        self._there = False
        self.lock = LOCK

    def library_is_there(self) -> bool:
        """Return whether the library is imported; if so, register the classes that were stored until the import."""
        # no import and no wait for an import: the importing thread may wait for our lock
        with self.lock:
            if not self._there:
                module = sys.modules.get(self._library)
                # importlib sets `_initializing` while a module is being imported
                if module is None or getattr(module.__spec__, "_initializing", False):
                    return False
                self._imported(module)
            return True

    def put(self, recipe: Recipe) -> None:
        with self.lock:
            if self.library_is_there():
                self._deliver(recipe)
                return
            if not self._recipes:
                self._hook.install()
            self._recipes[recipe.cls] = recipe

    def get(self, cls: type) -> Recipe | None:
        return self._recipes.get(cls)

    def drop(self, recipe: Recipe) -> None:
        with self.lock:
            if self._recipes.get(recipe.cls) is recipe:
                del self._recipes[recipe.cls]
                if not self._recipes:
                    self._hook.remove()

    def _imported(self, module: ModuleType) -> None:
        with self.lock:
            self._there = True
            self._hook.remove()
            recipes, self._recipes = self._recipes, {}
            for recipe in recipes.values():
                # an error must not break the import of the library
                result_or(functools.partial(self._deliver, recipe), functools.partial(_refused, module, recipe))


def _refused(module: ModuleType, recipe: Recipe, error: Exception) -> None:
    logger.error("%s did not accept %s", module.__name__, recipe.cls, exc_info=error)
