"""Flatten one level of a nested object, as torch does it or would inside the context manager."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import InvalidArgumentError
from ..private_names.of_torch import get_node_type, pytree
from ..recipe.aliases import PyTree
from ..recipe.contract import Recipe
from ..registry.claims import REGISTRY
from .walk import Children, Place, format_path, walk


class Node(NamedTuple):
    """One level of a nested object."""

    keys: list[Any]
    children: list[Any]
    recipe: Recipe | None  # ours, when the class is one of ours


def node_of(obj: object) -> Node | None:
    """Flatten one level of an object."""
    # obj: anything. Classes that `patch_transformers=True` knows are also flattened outside the context manager.
    recipe = recipe_for(type(obj))
    if recipe is not None:
        pairs, _ = recipe.flatten_with_keys(obj)
        return Node([key for key, _ in pairs], [child for _, child in pairs], recipe)
    node = pytree.SUPPORTED_NODES.get(get_node_type(obj))
    if node is None:
        return None
    if node.flatten_with_keys_fn is not None:
        pairs, _ = node.flatten_with_keys_fn(obj)
        return Node([key for key, _ in pairs], [child for _, child in pairs], None)
    children, _ = node.flatten_fn(obj)
    children = list(children)
    # transformers < 5.17 registers its outputs, which are mappings, without keys
    if isinstance(obj, Mapping) and len(obj) == len(children):
        return Node([pytree.MappingKey(key) for key in obj], children, None)
    return Node([pytree.SequenceKey(i) for i in range(len(children))], children, None)


def own_children(obj: object, keys: tuple[Any, ...] = ()) -> list[tuple[Any, Any]] | None:
    """Return the children of :func:`node_of` with their keys, ``None`` for a leaf; for :func:`.walk.walk`."""
    node = node_of(obj)
    return None if node is None else list(zip(node.keys, node.children, strict=True))


def leaf_places(tree: PyTree, children: Children, name: str = "tree") -> Iterator[Place]:
    """Yield the leaves of a nested object."""
    # name: what the object is called in the error; `"tree"` by default
    for place in walk(tree, children):
        if place.outer is not None:
            inner, outer = format_path(name, place.keys), format_path(name, place.outer)
            raise InvalidArgumentError(f"{format_cycle(inner, outer)}\n    {inner} = None")
        if place.is_leaf:
            yield place


def recipe_for(cls: type) -> Recipe | None:
    """Our recipe for a class: the registered one, else the one that the context manager would register."""
    recipe = REGISTRY.recipe_in_force(cls)
    if recipe is None and "transformers.cache_utils" in sys.modules and cls.__module__.startswith("transformers."):
        from ..huggingface.recipes import transformers_recipes

        recipe = transformers_recipes().get(cls)
    return recipe


def find_cycle(tree: PyTree, name: str = "tree") -> tuple[str, str] | None:
    """Find an object that holds itself, directly or further down; a walk from there never ends.

    >>> batch = {"x": [1]}
    >>> batch["x"].append(batch)
    >>> find_cycle(batch, "batch")
    ("batch['x'][1]", 'batch')
    """
    # name: what it is called; the paths begin with it
    # returns: the path at which an object stands that holds this very place, and the path of that object; `None` if
    # there is none
    for place in walk(tree, own_children):
        if place.outer is not None:
            return format_path(name, place.keys), format_path(name, place.outer)
    return None


def check_no_cycles(tree: PyTree, name: str, *, caller: str = "") -> None:
    """Refuse an object that holds itself."""
    # caller: the function that the user called, where the name alone does not state it
    cycle = find_cycle(tree, name)
    if cycle is not None:
        raise InvalidArgumentError(f"{f'{caller}: ' if caller else ''}{format_cycle(*cycle)}\n    {cycle[0]} = None")


def format_cycle(inner: str, outer: str) -> str:
    """Say what is the matter with an object that holds itself, and what to do."""
    return (
        f"{inner} is {outer} itself, so it has no end: torch flattens an object down to its leaves. Leave this "
        "reference out of the children of its class, or set it to None before:"
    )


def key_name(key: object) -> str:
    """Spell one key without its brackets.

    >>> import torch.utils._pytree as pytree
    >>> key_name(pytree.MappingKey("input_ids")), key_name(pytree.SequenceKey(1)), key_name(pytree.GetAttrKey("x"))
    ('input_ids', '1', 'x')
    """
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
