"""Flatten a batch once per call, for the checks, the search for the batch axis, and the split.

::

    args, kwargs     args[0]['x']  args[0]['mask']  kwargs['scale']   and the structure of (args, kwargs)
    label            label[0]  label[1]                               and the structure of the labels
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from yobx_flatten import Leaf, leaves
from yobx_flatten.private_names.of_torch import pytree

from ..device.block_masks import HeldMask, held, is_block_mask, leaf_test


@dataclasses.dataclass(frozen=True, slots=True)
class FlatTree:
    """A nested value and its leaves; a block mask is one leaf, in a :class:`HeldMask`."""

    name: str  # name of the value in key paths
    tree: Any
    leaves: list[Leaf]  # its leaves, in order

    @classmethod
    def of(cls, tree: Any, name: str) -> FlatTree:
        """Flatten a nested value."""
        found = leaves(_with_held_masks(tree), name=name)
        return cls(name, tree, [_hold(leaf) if is_block_mask(leaf.value) else leaf for leaf in found])


@dataclasses.dataclass(frozen=True, slots=True)
class FlatBatch:
    """Inputs and labels of a batch."""

    args: FlatTree  # positional arguments
    kwargs: FlatTree  # keyword arguments
    label: FlatTree

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], label: Any) -> FlatBatch:
        """Flatten inputs and labels."""
        return cls(FlatTree.of(args, "args"), FlatTree.of(dict(kwargs), "kwargs"), FlatTree.of(label, "label"))

    def __iter__(self) -> Iterator[FlatTree]:
        return iter((self.args, self.kwargs, self.label))

    def specs(self) -> tuple[pytree.TreeSpec, pytree.TreeSpec]:
        """Return the structures of ``(args, kwargs)`` and of the labels."""
        call = _with_held_masks((self.args.tree, self.kwargs.tree))
        return pytree.tree_structure(call), pytree.tree_structure(_with_held_masks(self.label.tree))


@dataclasses.dataclass(frozen=True, slots=True)
class FlatMicrobatch:
    """The leaves of one microbatch."""

    inputs: list[Any]  # leaves of arguments and keyword arguments
    spec: pytree.TreeSpec  # structure of `(args, kwargs)`
    labels: list[Any]  # leaves of the labels
    label_spec: pytree.TreeSpec  # structure of the labels
    rows: int | None  # number of rows, as in `Microbatch`


def _with_held_masks(tree: Any) -> Any:
    """The tree with masks as leaves: torch would flatten those of a registered class, whose tensors cannot be cut."""
    return tree if leaf_test() is None else held(tree)


def _hold(leaf: Leaf) -> Leaf:
    return leaf._replace(value=HeldMask(leaf.value))
