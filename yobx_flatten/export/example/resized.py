"""Make the inputs of an example again, with different sizes or values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...private_names.of_torch import pytree
from ...recipe.aliases import PyTree
from ...runners.signature import Signature
from ...storage.matching import leaves_of
from ...trees.naming import leaf_names
from .example import Example


def tensors_of(example: Example, signature: Signature) -> dict[str, torch.Tensor]:
    """Return the tensors of an example that are inputs of its program, by name."""
    wanted = {name for name, _, _ in signature.inputs}
    named = zip(leaf_names(example.inputs), leaves_of(example.inputs), strict=True)
    return {name: leaf for name, leaf in named if name in wanted and isinstance(leaf, torch.Tensor)}


def resized_leaves(example: Example, signature: Signature, sizes: Mapping[str, int]) -> dict[str, torch.Tensor] | None:
    """Return the inputs of an example in other sizes, repeated or cut, by name; ``None`` where that cannot be done."""
    wanted = {name: found for name, _, found in signature.inputs}
    made: dict[str, torch.Tensor] = {}
    for name, leaf in tensors_of(example, signature).items():
        other = leaf
        for axis, size in enumerate(wanted[name]):
            if isinstance(size, Mapping):
                if any(part and part not in sizes for part in size):
                    return None
                length = sum(factor * (sizes[part] if part else 1) for part, factor in size.items())
                if length < 1 or leaf.shape[axis] < 1:
                    return None
                if length != leaf.shape[axis]:
                    places = torch.arange(length, device=leaf.device) % leaf.shape[axis]
                    other = other.index_select(axis, places)
        made[name] = other
    return made


def arguments_with(example: Example, made: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an example with copies of other tensors instead of its own. The block must be open."""
    own = dict(zip(leaf_names(example.inputs), leaves_of(example.inputs), strict=True))
    by_id = {id(own[name]): tensor for name, tensor in made.items()}

    def replaced(leaf: PyTree) -> PyTree:
        found = by_id.get(id(leaf), leaf)
        return found.clone() if isinstance(found, torch.Tensor) else found

    args, kwargs = pytree.tree_map(replaced, (example.args, dict(example.kwargs)))
    return args, kwargs
