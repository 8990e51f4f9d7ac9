"""One level of any nested object: its children with their keys, as torch takes it apart or would inside our block."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.utils._pytree as pytree

from .recipe import Recipe
from .registry import REGISTRY

__all__ = ["Node", "key_name", "node_of"]


class Node(NamedTuple):
    """One level of a nested object."""

    keys: list[Any]
    children: list[Any]
    recipe: Recipe | None  # ours, when the class is one of ours


def node_of(obj: Any) -> Node | None:
    """Take one level of an object apart.

    Args:
        obj: anything. Classes that ``patch_transformers=True`` knows come apart outside the block, too.

    Returns:
        Keys and children, or ``None`` for a leaf.
    """
    recipe = recipe_for(type(obj))
    if recipe is not None:
        pairs, _ = recipe.flatten_with_keys(obj)
        return Node([key for key, _ in pairs], [child for _, child in pairs], recipe)
    node = pytree.SUPPORTED_NODES.get(pytree._get_node_type(obj))
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


def recipe_for(cls: type) -> Recipe | None:
    """Our recipe for a class: the one in force, else the one that would be in force inside the block."""
    recipe = REGISTRY.recipe_in_force(cls)
    if recipe is None and "transformers.cache_utils" in sys.modules and cls.__module__.startswith("transformers."):
        from .huggingface.known import transformers_recipes

        recipe = transformers_recipes().get(cls)
    return recipe


def key_name(key: Any) -> str:
    """Spell one key without its brackets.

    >>> import torch.utils._pytree as pytree
    >>> key_name(pytree.MappingKey("input_ids")), key_name(pytree.SequenceKey(1)), key_name(pytree.GetAttrKey("x"))
    ('input_ids', '1', 'x')
    """
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
