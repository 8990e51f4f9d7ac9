"""Take a snapshot of a nested object: leaves, structure, and facts about each leaf."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..core.contents import Layouts
from ..declare.scopes import options_in_use, register_flattening_functions
from ..diagnose.opaque import find_unregistered
from ..errors import NotRegisteredError
from ..private_names.of_torch import pytree
from ..recipe.aliases import PyTree
from ..trees.walk import Place, check_no_cycles, key_name, leaf_places, own_children, recipe_for


class Fact(NamedTuple):
    """Facts about one leaf, without the leaf."""

    path: str  # the way to it, with dots: `cache.key_0`
    dtype: torch.dtype | None  # the dtype of a tensor, `None` for anything else
    shape: tuple[int, ...]  # the shape of a tensor, `()` for anything else
    device: torch.device | None  # where the tensor was
    # what its axes mean, if the registration of its class states it; see `yobx_flatten.trees.Leaf`
    axes: dict[int, str] | None
    value: Any  # the leaf itself, where it is not a tensor

    @property
    def is_tensor(self) -> bool:
        """Whether the leaf is a tensor."""
        return self.dtype is not None


class Snapshot:
    """A copy of a nested object. Every :meth:`restore` makes a new object of it, so nothing can change the copy."""

    def __init__(self, facts: tuple[Fact, ...], spec: pytree.TreeSpec, load: Callable[[], Sequence[Any]]) -> None:
        self.facts, self.spec, self._load = facts, spec, load

    @classmethod
    def take(cls, tree: PyTree, *, name: str, device: torch.device | None) -> Snapshot:
        """Copy a nested object. The block must be open."""
        check_no_cycles(tree, name)
        leaves, spec = pytree.tree_flatten(tree)
        _check_no_hidden_tensors(leaves, tree, name)
        facts = tuple(map(_fact, leaf_places(tree, own_children, name)))
        kept = tuple(_copy(leaf, device) for leaf in leaves)
        return cls(facts, spec, lambda: kept)

    def leaves(self) -> Sequence[Any]:
        """The copied leaves themselves: not to be changed."""
        return self._load()

    def restore(self, leaves: Sequence[Any] | None = None) -> PyTree:
        """Make a new object of the copy, its tensors where they were."""
        if leaves is None:
            leaves = [_copy(leaf, fact.device) for leaf, fact in zip(self.leaves(), self.facts, strict=True)]
        with libraries_in_use():
            return pytree.tree_unflatten(list(leaves), self.spec)


def same_value(one: Fact, other: Fact) -> bool:
    """Whether two leaves that are not tensors are the same; NaN is the same as NaN."""
    # returns: whether they are the same object, or plain values of one type and text; other objects are not compared
    if one.value is other.value:
        return True
    plain = isinstance(one.value, _PLAIN) and type(one.value) is type(other.value)
    return plain and repr(one.value) == repr(other.value)


def libraries_in_use() -> contextlib.AbstractContextManager[Any]:
    """Open the block for the libraries that this process has imported."""
    return register_flattening_functions(**options_in_use())


def _fact(place: Place) -> Fact:
    path, leaf = ".".join(map(key_name, place.keys)), place.obj
    recipe = recipe_for(type(place.parent)) if place.keys else None
    axes = None if recipe is None or recipe.axes is None else recipe.axes(key_name(place.keys[-1]))
    if isinstance(leaf, torch.Tensor):
        return Fact(path, leaf.dtype, tuple(leaf.shape), leaf.device, axes, None)
    return Fact(path, None, (), None, axes, leaf)


def _copy(leaf: object, device: torch.device | None) -> object:
    if isinstance(leaf, torch.Tensor):
        # copy=True: a tensor that is on the device already would come back itself
        return leaf.detach().to(device=leaf.device if device is None else device, copy=True)
    numpy = sys.modules.get("numpy")
    return leaf.copy() if numpy is not None and isinstance(leaf, numpy.ndarray) else leaf


_PLAIN = (torch.Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _check_no_hidden_tensors(leaves: Sequence[Any], tree: PyTree, name: str) -> None:
    layouts = Layouts()
    if all(isinstance(leaf, _PLAIN) or layouts(type(leaf)).is_tensor for leaf in leaves):
        return
    found = [unregistered for unregistered in find_unregistered(tree, name=name) if unregistered.inside is None]
    if found:
        raise NotRegisteredError("\n".join(map(str, found)))
