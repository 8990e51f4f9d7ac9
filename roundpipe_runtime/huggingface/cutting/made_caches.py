"""Caches that the model's own code makes and fills, such as the keys and values of a learned prefix.

::

    phase 0     makes the cache: the tensors in it are values of the state, through which gradients flow back
    layer       gets a cache with the entries that it reads; what it writes into them is dropped after the call
    phase 1     makes the cache again

That is exact if no layer reads an entry that another one has written. Which entries a layer reads is observed when the
plan is made; others are not there.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import PyTree

from ...batch.entries import is_cache
from ..errors import BatchStructureError, CutError
from .caches import parts_of, with_layers
from .placeholder import Key

# An entry of a cache: 1 for those of cross-attention, and the number in its list.
Entry: TypeAlias = tuple[int, int]

# The class of an entry, and its attributes: their structure, and their values with a `Key` for each tensor.
_Described: TypeAlias = tuple[type, pytree.TreeSpec, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class MadeCache:
    """A cache among the arguments of a call, without tensors."""

    empty: Any  # the cache without entries
    # description of each entry, by part; `None` for one that the layer does not read
    entries: tuple[tuple[_Described | None, ...], ...]

    @classmethod
    def of(cls, cache: Any, named: Callable[[Any], Any], read: frozenset[Entry] | None) -> MadeCache:
        """Describe a cache."""
        # read: entries that the layer reads; `None` for all
        found = []
        for side, part in enumerate(parts_of(cache)):
            described: list[_Described | None] = []
            for number, entry in enumerate(part.layers):
                if read is not None and (side, number) not in read:
                    described.append(None)
                    continue
                leaves, spec = pytree.tree_flatten(dict(vars(entry)))
                described.append((type(entry), spec, tuple(named(leaf) for leaf in leaves)))
            found.append(tuple(described))
        return cls(with_layers(cache, [[] for _ in found]), tuple(found))

    def keys(self) -> set[Key]:
        """Return the keys of its tensors."""
        held = [entry for part in self.entries for entry in part if entry is not None]
        return {leaf for _, _, leaves in held for leaf in leaves if isinstance(leaf, Key)}

    def build(self, values: Mapping[Key, torch.Tensor]) -> Any:
        """Return the cache, which records which of its entries are read."""
        return with_layers(self.empty, [_Entries(_entry(one, values) for one in part) for part in self.entries])


def _entry(described: _Described | None, values: Mapping[Key, torch.Tensor]) -> Any:
    if described is None:
        return None
    kind, spec, leaves = described
    tensors = [values[leaf] for leaf in leaves if isinstance(leaf, Key)]
    device = tensors[0].device if tensors else None
    filled = [
        values[leaf] if isinstance(leaf, Key) else device if isinstance(leaf, torch.device) and device else leaf
        for leaf in leaves
    ]
    made: Any = object.__new__(kind)
    made.__dict__.update(copy.copy(pytree.tree_unflatten(filled, spec)))
    return made


class _Entries(list[Any]):
    """The entries of a cache, of which those that are read are recorded."""

    def __init__(self, entries: Iterable[Any]) -> None:
        super().__init__(entries)
        self.read: set[int] = set()

    def __getitem__(self, index: Any) -> Any:
        for number in range(len(self))[index] if isinstance(index, slice) else [range(len(self))[index]]:
            self.read.add(number)
            if super().__getitem__(number) is None:
                raise BatchStructureError(
                    f"A layer reads entry {number} of the cache that the model made, which it did not read with the "
                    "example that the model was split with. Wrap it with an example like this batch:\n"
                    "    wrap_model_to_roundpipe(model, example=batch)"
                )
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))


def entries_read(arguments: PyTree) -> frozenset[Entry]:
    """Return the entries that a layer has read of the caches among its arguments."""
    caches = [leaf for leaf in pytree.tree_leaves(arguments) if is_cache(leaf)]
    lists = [(side, part.layers) for cache in caches for side, part in enumerate(parts_of(cache))]
    return frozenset((side, number) for side, held in lists if isinstance(held, _Entries) for number in held.read)


def check_apart(calls: Sequence[str], read: Mapping[int, frozenset[Entry]]) -> None:
    """Check that no two calls read the same entry of a cache that the model made."""
    readers: dict[Entry, int] = {}
    for place, entries in sorted(read.items()):
        for entry in sorted(entries):
            other = readers.setdefault(entry, place)
            if other != place:
                raise CutError(
                    "structure",
                    f"{calls[place]} gets a cache that the model made and filled, and reads an entry of it that "
                    f"{calls[other]} has read and may have written. Keys and values cannot pass from layer to layer.",
                )


def without_caches(output: PyTree) -> PyTree:
    """Return an output of a model without caches that the call did not ask for."""
    # output: output of the model; a mapping is changed in place
    if isinstance(output, dict):
        for name in [name for name, value in output.items() if is_cache(value)]:
            output[name] = None
        return output
    return tuple(value for value in output if not is_cache(value)) if type(output) is tuple else output
