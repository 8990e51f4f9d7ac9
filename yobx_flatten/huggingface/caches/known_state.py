"""Reuse the template (description of all attributes) of an earlier cache layer, so that only leaves are read.

Making the template of a cache layer takes 0.1 ms. So the last four templates of each layer index are stored. A stored
template is reused for a layer whose attributes have the same names and types, and the same values except for leaves.
Attributes inside a nested dict are also compared.
"""

# attributes    conv_states, device, has_previous_state
# level 0       {0: tensor}, cpu, {0: True}
# level 1       1, 0, tensor, 1, 0, True                  of each dict: its length, its keys, its values

from __future__ import annotations

import functools
import itertools
import json
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch

from ...errors import CacheStructureError
from ...registry.recipe.static_codec import dump_static, load_static
from .state import SIZES, Template, leaf_paths, lengths_of, part_class, read_state

# Equal values of these types are identical in effect. Floats are not, because of the two zeros.
_PLAIN = frozenset({bool, int, str, type(None), torch.dtype, torch.device})

# How many templates are kept for a place, and for how many places.
_EACH, _MOST = 4, 4096

_KNOWN: dict[Hashable, list[KnownState]] = {}  # by class, for a cache layer also by its index


def read_known_state(place: Hashable, held: dict[str, Any], *, in_cache: bool = False) -> tuple[KnownState, list[Any]]:
    """Describe an object's attributes, and list its leaves. The description of a similar earlier object is reused."""
    states = _KNOWN.get(place, [])
    for state in states:
        leaves = state.leaves_of(held)
        if leaves is not None:
            return state, leaves
    template, leaves = read_state(held, in_cache=in_cache)
    state = KnownState(held, template, leaves)
    if len(_KNOWN) >= _MOST:
        _KNOWN.clear()
    _KNOWN[place] = [state, *states[: _EACH - 1]]  # a new list: other threads may read the old one
    return state, leaves


class KnownState:
    """Describes the attributes of an object, and checks whether the description also fits another object."""

    def __init__(self, held: dict[str, Any], template: Template, leaves: list[Any]) -> None:
        self.text, self.paths = json.dumps(template), leaf_paths(template)
        self.lengths = lengths_of(template)
        self.code, self.names = "", list[str]()  # the entry of a cache with this layer in this place
        self._attributes = list(held)
        counter = itertools.count()
        level = [_part_of(held[name], template.get(name, ["length"]), counter) for name in held]
        self._levels: list[tuple[list[type], list[tuple[int, bool]]]] = []
        flat: list[_Part] = []
        while level:
            inner = [(i, type(one.value) not in (list, tuple)) for i, one in enumerate(level) if one.is_container]
            self._levels.append(([type(part.value) for part in level], inner))
            flat += level
            level = [one for part in level for one in part.below]
        places: dict[str, list[int]] = {"leaf": [], "plain": [], "same": [], "dumped": []}
        for place, part in enumerate(flat):
            places.setdefault(part.kind, []).append(place)
        self._leaves = _getter(sorted(places["leaf"], key=lambda place: flat[place].leaf))
        self._plain = _getter(places["plain"])
        self._values = self._plain([part.value for part in flat])
        self._same = [(place, flat[place].leaf) for place in places["same"]]
        self._dumped = [(place, json.dumps(dump_static(flat[place].value))) for place in places["dumped"]]
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._tensors = None if len(tensors) == len(leaves) else tensors  # `None`: all
        follows = any(isinstance(held[name], (torch.dtype, torch.device)) for name in template)
        self._kinds = [(leaves[index].dtype, leaves[index].device) for index in tensors] if follows else None
        sized = {self.paths.index(SIZES[name][0]) for name in held if name in SIZES and SIZES[name][0] in self.paths}
        self._sized = [(index, leaves[index].dim() > 1) for index in sized]

    def leaves_of(self, held: dict[str, Any]) -> list[Any] | None:
        """Return the leaves in an object's attributes; ``None`` if the template does not describe these attributes."""
        if list(held) != self._attributes:
            return None
        flat: list[Any] = []
        level = list(held.values())
        for types, inner in self._levels:
            if list(map(type, level)) != types:
                return None
            flat += level
            below: list[Any] = []
            for place, is_mapping in inner:
                value = level[place]
                if is_mapping:
                    entries = value if type(value) is dict else vars(value)
                    below += (len(entries), *entries, *entries.values())
                else:
                    below += (len(value), *value)
            level = below
        if level or self._plain(flat) != self._values:
            return None
        leaves = list(self._leaves(flat))
        tensors = leaves if self._tensors is None else [leaves[index] for index in self._tensors]
        if len(set(map(id, tensors))) != len(tensors):
            return None
        if self._kinds is not None and [(tensor.dtype, tensor.device) for tensor in tensors] != self._kinds:
            return None
        for place, index in self._same:
            if flat[place] is not leaves[index]:
                return None
        for index, fits in self._sized:
            if (leaves[index].dim() > 1) is not fits:
                return None
        for place, text in self._dumped:
            if json.dumps(dump_static(flat[place])) != text:
                return None
        return leaves


class _Part(NamedTuple):
    """A value nested in an object, and how it is compared with the value at the same place in another object."""

    value: Any
    kind: Literal["leaf", "same", "plain", "dumped", "any"]
    leaf: int = 0  # the number of the leaf
    below: tuple[_Part, ...] = ()
    is_container: bool = False


def _part_of(value: Any, entry: list[Any], counter: Iterator[int]) -> _Part:
    # entry: the template's description of the value
    kind = entry[0]
    if kind in ("tensor", "number"):
        return _Part(value, "leaf", next(counter))
    if kind == "same":
        return _Part(value, "same", entry[1])
    if kind in ("length", "shape"):
        return _Part(value, "any")
    if type(value) in _PLAIN:
        return _Part(value, "plain")
    if type(value) not in (dict, list, tuple) and kind != "object":
        return _Part(value, "dumped")
    keys: Iterable[Any] = ()
    values: Collection[Any] = value
    if type(value) not in (list, tuple):
        entries = value if type(value) is dict else vars(value)
        keys, values = entries.keys(), entries.values()
    inner: Iterable[list[Any]] = [["fixed"]] * len(values)
    if kind != "fixed":
        inner = entry[2].values() if kind == "object" else [one[1] if kind == "dict" else one for one in entry[1]]
    below = [_Part(len(values), "plain"), *(_part_of(key, ["fixed"], counter) for key in keys)]
    below += [_part_of(one, stated, counter) for one, stated in zip(values, inner, strict=True)]
    return _Part(value, "any", 0, tuple(below), is_container=True)


def _getter(places: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    # itemgetter returns a tuple only for two items or more
    if len(places) > 1:
        return operator.itemgetter(*places)
    [place] = places or [0]
    return (lambda values: (values[place],)) if places else lambda values: ()


_DEEPEST = 16
_MOST_ENTRIES = 10_000
_MOST_AXES = 16


# Read the templates in the names of a cache as untrusted data.
#
# A name such as `layer_0=transformers.cache_utils:DynamicIndexedLayer={"keys": ["tensor"], ...}` can come from a file
# of an unknown author. So it is checked first: entries have the kinds and types of a fixed table, and special
# attributes such as `__class__` are refused.


@functools.lru_cache(maxsize=1024)
def read_template(text: str) -> Template:
    # the result is cached; callers must not change it
    try:
        template = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(f"it is not JSON ({error})") from None
    _check(["object", None, template], 0, itertools.count())
    return template  # type: ignore[no-any-return] # checked


def _check(entry: object, depth: int, counter: Iterator[int]) -> None:
    if depth > _DEEPEST or next(counter) > _MOST_ENTRIES:
        raise _refused(f"it has more than {_DEEPEST} levels or {_MOST_ENTRIES} entries")
    below: Iterable[object] = ()
    match entry:
        case ["tensor" | "number" | "length"]:
            pass
        case ["same" | "dtype" | "device", place] if type(place) is int and 0 <= place < _MOST_ENTRIES:
            pass
        case ["shape", place, axis] if type(place) is type(axis) is int and 0 <= place < _MOST_ENTRIES:
            if not -_MOST_AXES <= axis < _MOST_AXES:
                raise _refused(f"it has the axis {axis}")
        case ["list" | "tuple", list(below)]:
            pass
        case ["dict", list(pairs)] if all(type(pair) is list and len(pair) == 2 for pair in pairs):
            below = [value for key, value in pairs if hash(load_static(key)) is not None]
        case ["object", name, dict(held)]:
            # obj.__class__ = ... would change the class of the object
            if special := [one for one in held if one.startswith("__") or one == "_yobx_placeholders"]:
                raise _refused(f"it sets {special[0]}")
            if depth:
                part_class(name)
            below = held.values()
        case ["fixed", value]:
            load_static(value)
        case _:
            raise _refused(f"it has the unknown entry {str(entry)[:80]}")
    for one in below:
        _check(one, depth + 1, counter)


def _refused(reason: str) -> CacheStructureError:
    return CacheStructureError(f"The leaf names of a cache contain an invalid description of a layer: {reason}.")
