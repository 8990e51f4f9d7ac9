"""Register classes with JAX, which never forgets one: its functions look up the current registration.

Nothing takes a class back from JAX, or puts another one in its place
(https://github.com/jax-ml/jax/issues/21666): its compiled functions rely on what was registered.

What happens to a class when its recipe goes and comes:

    registered      JAX flattens it by the recipe
    unregistered    JAX continues with the last recipe: the class stays a node, and compiled functions still work
    again, same     the same, and nothing is compiled again
    again, other    JAX flattens it by the new recipe; tree definitions made before are unflattened by the old one,
                    and do not equal those made now, so that a function compiled before is compiled anew
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from typing import Any

from ..errors import AlreadyRegisteredError, describe_class
from ..private_names.of_torch import GetAttrKey, KeyEntry, MappingKey, SequenceKey
from ..recipe.aliases import Static
from ..recipe.contract import Recipe, hashable, original
from .waiting import Waiting

_THEIRS = "registered with JAX by other code"


class Jax:
    """The pytree registry of JAX; before JAX is imported, what waits for it."""

    name = "jax"

    def __init__(self) -> None:
        self.waiting = Waiting("jax", self._put)
        self._nodes: dict[type, _Node] = {}  # permanently, as in JAX

    def read(self, cls: type) -> Any:
        """Return our registered or waiting recipe, a mark for another library's class, or ``None``."""
        with self.waiting.lock:
            if not self.waiting.library_is_there():
                return self.waiting.get(cls)
            node = self._nodes.get(cls)
            if node is not None:
                return node.in_force
            return _THEIRS if _is_node(cls) else None

    def write(self, recipe: Recipe) -> None:
        """Register the recipe."""
        self.waiting.put(recipe)

    def restore(self, recipe: Recipe, found: object) -> None:
        """Take the recipe out of force; JAX continues with the last one.

        A class is only claimed where nothing of ours was found, and what others registered cannot be replaced.
        """
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
    """JAX's entry for one class: three methods, and the recipes that they look up."""

    def __init__(self, recipe: Recipe) -> None:
        self.in_force: Recipe | None = recipe
        self._recipes = [recipe]
        self._current = (0, recipe)  # one object, so that a flatten in another thread sees one or the other

    def put(self, recipe: Recipe) -> None:
        """Let JAX flatten the class by this recipe from now on."""
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
    """The static part under a class's second recipe or a later one; under the first it travels as it is."""

    number: int
    static: Any


def _aux(number: int, static: Static) -> Any:
    aux = hashable(static)
    return _Later(number, aux) if number else aux


def _is_node(cls: type) -> bool:
    tree_util = sys.modules["jax"].tree_util
    if hasattr(tree_util, "is_tree_node"):
        return bool(tree_util.is_tree_node(cls))
    # older versions have no public way to ask
    return cls in sys.modules["jax._src.tree_util"]._registry


def _jax_key(key: KeyEntry) -> Any:
    tree_util = sys.modules["jax"].tree_util
    if isinstance(key, GetAttrKey):
        return tree_util.GetAttrKey(key.name)
    if isinstance(key, SequenceKey):
        return tree_util.SequenceKey(key.idx)
    return tree_util.DictKey(key.key) if isinstance(key, MappingKey) else key
