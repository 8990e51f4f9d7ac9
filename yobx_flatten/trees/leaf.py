"""The leaves of any nested object: the key path of each, and the meaning of its axes where its class states it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.utils._pytree as pytree

from ..aliases import PyTree
from ..errors import InvalidArgumentError
from ..recipe.contract import Recipe
from ..registry.claims import REGISTRY
from .node import format_cycle, key_name
from .walk import children_of, format_entry

__all__ = ["Leaf", "leaves"]


class Leaf(NamedTuple):
    """One leaf of a nested object.

    Attributes:
        path: key path of the leaf, as Python.
        value: the leaf itself.
        axes: meaning of its axes (``{0: "batch", 2: "length"}``), if it is a child of a class whose registration states
            it, and ``None`` otherwise. An axis that is not listed does not vary: ``{}`` is a tensor of fixed shape.
    """

    path: str
    value: Any
    axes: dict[int, str] | None


def leaves(tree: PyTree, *, name: str = "tree") -> list[Leaf]:
    """List the leaves of a nested object, as torch's pytree sees them now and in its order.

    Args:
        tree: anything. An object of a class that is not registered is a leaf, however many tensors it holds.
        name: what ``tree`` is called; the paths begin with it. ``"tree"`` by default.

    Returns:
        One :class:`Leaf` for each entry of ``torch.utils._pytree.tree_leaves(tree)``.

    Raises:
        InvalidArgumentError: when an object holds itself.

    >>> import torch
    >>> [(leaf.path, leaf.axes) for leaf in leaves({"x": torch.zeros(2), "y": [1]}, name="batch")]
    [("batch['x']", None), ("batch['y'][0]", None)]
    """
    return list(_leaves(tree, name, None, {}))


def _leaves(obj: Any, path: str, axes: dict[int, str] | None, above: dict[int, str]) -> Iterator[Leaf]:
    node = pytree.SUPPORTED_NODES.get(pytree._get_node_type(obj))
    if node is None:
        yield Leaf(path, obj, axes)
        return
    if id(obj) in above:
        raise InvalidArgumentError(f"{format_cycle(path, above[id(obj)])}\n    {path} = None")
    recipe = REGISTRY.recipe_in_force(type(obj))
    children = children_of(node, obj, path)
    if children:
        above[id(obj)] = path
        for key, child in children:
            yield from _leaves(child, path + format_entry(key), _axes(recipe, key), above)
        del above[id(obj)]


def _axes(recipe: Recipe | None, key: Any) -> dict[int, str] | None:
    return None if recipe is None or recipe.axes is None else recipe.axes(key_name(key))
