"""List the leaves of a nested object with their key paths, and the meaning of their axes where known."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..recipe.aliases import PyTree
from ..registry.claims import REGISTRY
from .node import key_name, leaf_places
from .walk import Place, format_path, torch_children


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
    places = leaf_places(tree, torch_children(name), name)
    return [Leaf(format_path(name, place.keys), place.obj, _meaning(place)) for place in places]


def _meaning(place: Place) -> dict[int, str] | None:
    """What the axes of a leaf mean, by the class that holds it."""
    recipe = REGISTRY.recipe_in_force(type(place.parent)) if place.keys else None
    return None if recipe is None or recipe.axes is None else recipe.axes(key_name(place.keys[-1]))
