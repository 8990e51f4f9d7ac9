"""Register classes with optree and JAX, at once or, if the library is not imported yet, right after its import."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from ..core.private_names.of_torch import GetAttrKey, KeyEntry, MappingKey, SequenceKey
from ..errors import AlreadyRegisteredError, describe_class
from ..errors.failures import result_or
from .patches import LOCK, ImportHook
from .recipe.aliases import Static
from .recipe.contract import Recipe, hashable, original
from .torch_tables import order_kept, register_again, registered, replace

NAMESPACE = "yobx_flatten"

logger = logging.getLogger("yobx_flatten")


class _Optional:
    """Registers classes with a library that may be imported later; until its import, the classes are stored here."""

    # a method holds the lock from the check of the library until the change is done, so that no other thread imports
    # the library between the two

    name: str

    def __init__(self) -> None:
        self._recipes: dict[type, Recipe] = {}  # until the import
        self._hook = ImportHook(self.name.__eq__, self._imported)
        self._there = False

    def read(self, cls: type) -> Any:
        with LOCK:
            return self._read(cls) if self._is_there() else self._recipes.get(cls)

    def write(self, recipe: Recipe) -> None:
        with LOCK:
            if self._is_there():
                self._write(recipe)
                return
            if not self._recipes:
                self._hook.install()
            self._recipes[recipe.cls] = recipe

    def restore(self, recipe: Recipe, found: object) -> None:
        with LOCK:
            if self._is_there():
                self._restore(recipe, found)
            elif self._recipes.get(recipe.cls) is recipe:
                del self._recipes[recipe.cls]
                if not self._recipes:
                    self._hook.remove()

    def _is_there(self) -> bool:
        """Return whether the library is imported; if so, register the classes whose registration was deferred."""
        # no import and no wait for an import: the importing thread may wait for our lock
        if not self._there:
            module = sys.modules.get(self.name)
            # importlib sets `_initializing` while a module is being imported
            if module is None or getattr(module.__spec__, "_initializing", False):
                return False
            self._imported(module)
        return True

    def _imported(self, module: ModuleType) -> None:
        with LOCK:
            self._there = True
            self._hook.remove()
            recipes, self._recipes = self._recipes, {}
            for recipe in recipes.values():
                # an error must not break the import of the library
                result_or(functools.partial(self._write, recipe), functools.partial(_log_refusal, module, recipe))

    # read and change the registry of the imported library

    def _read(self, cls: type) -> Any: ...

    def _write(self, recipe: Recipe) -> None: ...

    def _restore(self, recipe: Recipe, found: object) -> None: ...


def _log_refusal(module: ModuleType, recipe: Recipe, error: Exception) -> None:
    logger.error("%s did not accept %s", module.__name__, recipe.cls, exc_info=error)


class Optree(_Optional):
    """Registers classes in optree's namespace ``"yobx_flatten"``."""

    name = "optree"

    def _read(self, cls: type) -> Any:
        return registered(NAMESPACE, cls)

    def _write(self, recipe: Recipe) -> None:
        optree = sys.modules["optree"]

        def register() -> None:
            optree.register_pytree_node(
                recipe.cls,
                functools.partial(_flatten if recipe.has_keys else _flatten_by_position, recipe),
                lambda static, children: recipe.unflatten(list(children), static),
                path_entry_type=_entry_type() if recipe.has_keys else optree.FlattenedEntry,
                namespace=NAMESPACE,
            )

        replace(registered(NAMESPACE, recipe.cls), NAMESPACE, recipe.cls, register)

    def _restore(self, recipe: Recipe, found: object) -> None:
        current = registered(NAMESPACE, recipe.cls)
        function: Any = getattr(current, "flatten_func", None)
        is_partial = isinstance(function, functools.partial)
        is_ours = is_partial and function.func in (_flatten, _flatten_by_position) and function.args[0] is recipe
        if current is not None and not is_ours:
            return  # other code registered the class after us
        with order_kept(found):
            if current is not None:
                sys.modules["optree"].unregister_pytree_node(recipe.cls, namespace=NAMESPACE)
            register_again(found)


def _flatten(recipe: Recipe, obj: object) -> tuple[list[Any], Any, list[Any]]:
    pairs, static = recipe.flatten_with_keys(obj)
    return [child for _, child in pairs], static, [_entry(key) for key, _ in pairs]


def _flatten_by_position(recipe: Recipe, obj: object) -> tuple[list[Any], Any]:
    return recipe.flatten(obj)


class _Attribute(str):
    """Entry of an optree path for a child that is an attribute; it is shown as the attribute's name."""

    __slots__ = ()


class _Index(int):
    """Entry of an optree path for a child in a sequence; it is shown as the child's index."""


def _entry(key: KeyEntry) -> Any:
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


# JAX cannot remove or replace the registration of a class, because compiled functions rely on the registration
# (https://github.com/jax-ml/jax/issues/21666). So the functions that are registered with JAX look up the recipe:
#
#     registered                      JAX uses the recipe
#     unregistered                    JAX continues to use the last recipe, so that compiled functions still work
#     registered again, same recipe   nothing is compiled again
#     registered again, new recipe    JAX uses the new recipe and compiles functions again; earlier tree definitions
#                                     continue to use the earlier recipe


class Jax(_Optional):
    """Registers classes in JAX's pytree registry."""

    name = "jax"

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[type, _Node] = {}  # entries are never removed, as in JAX

    def _read(self, cls: type) -> Any:
        if (node := self._nodes.get(cls)) is not None:
            return node.in_force
        tree_util = sys.modules["jax"].tree_util
        if hasattr(tree_util, "is_tree_node"):
            is_node = tree_util.is_tree_node(cls)
        else:  # older versions of JAX have no public function for this
            is_node = cls in sys.modules["jax._src.tree_util"]._registry
        return "registered with JAX by other code" if is_node else None

    def _write(self, recipe: Recipe) -> None:
        if (node := self._nodes.get(recipe.cls)) is not None:
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

    def _restore(self, recipe: Recipe, found: object) -> None:
        node = self._nodes.get(recipe.cls)
        if node is not None and node.in_force is recipe:
            node.in_force = None  # JAX, which cannot unregister a class, continues to call its functions


class _Node:
    """Functions registered with JAX for one class, which call the flatten functions that the user registered last."""

    def __init__(self, recipe: Recipe) -> None:
        self.in_force: Recipe | None = recipe
        self._recipes = [recipe]
        self._current = (0, recipe)  # one tuple, so that another thread never reads a number with a different recipe

    def put(self, recipe: Recipe) -> None:
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
    """Static data that JAX stores, with the index of the class's registration whose functions made the static data."""

    number: int
    static: Any


def _aux(number: int, static: Static) -> Any:
    aux = hashable(static)
    return _Later(number, aux) if number else aux


def _jax_key(key: KeyEntry) -> Any:
    tree_util = sys.modules["jax"].tree_util
    if isinstance(key, GetAttrKey):
        return tree_util.GetAttrKey(key.name)
    if isinstance(key, SequenceKey):
        return tree_util.SequenceKey(key.idx)
    return tree_util.DictKey(key.key) if isinstance(key, MappingKey) else key
