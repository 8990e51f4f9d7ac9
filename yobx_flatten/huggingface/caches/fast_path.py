"""Flatten and rebuild caches whose layers are all of one kind in one pass.

A cache is flattened at every call of a program, and mostly looks as the last one did. So how a list of layers was
read is kept by the classes of the layers, and tried first: its functions (:mod:`.layer_code`) check as they read, and
where a layer is not as it was then, the layers are read one by one, and that is kept. Nothing is taken on trust.

    classes of the layers      D  W  D  W
    read by two functions      D  D     W  W      checks; leaves k0 v0 k2 v2 k1 v1 k3 v3
    put in order               k0 v0 k1 v1 k2 v2 k3 v3
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import StaticDataError
from ...recipe.codegen import builtin_base
from .layer_code import filler, reader
from .layers import PLACEHOLDERS
from .length import length_leaf
from .state import Template, follow_state, leaf_paths, leaf_types, read_state
from .stored_templates import read_template

# What reading or building raises where an object is not as expected.
_UNEXPECTED = (AttributeError, IndexError, KeyError, TypeError, ValueError, StaticDataError)

_KEPT_READINGS = 8  # for each list of classes: two models with other windows, caches filled and empty

Pick = Callable[[Any], Any]


# -- reading ---------------------------------------------------------------------------------------------------------


class LayerRead(NamedTuple):
    """How a layer was read: what its function is made from."""

    cls: Any
    attributes: tuple[str, ...] | int  # all that it has; their number where its template states which
    template: str  # as JSON
    leaf_count: int


class _Reading(NamedTuple):
    """How all layers of a cache were read."""

    parts: list[tuple[Callable[..., bool], Pick]]  # a function, and its layers
    order: Pick | None  # leaves as the functions find them -> leaves of the cache
    names: list[str]
    full: int | None  # the leaf that holds every token
    slides: bool  # where there is none: what the layers counted is a tensor among the leaves


_READINGS: dict[tuple[Any, ...], tuple[_Reading, ...]] = {}


def read_as_before(layers: list[Any], plain: bool) -> tuple[list[Any], list[str]] | None:
    """Flatten layers as layers of these classes were flattened before."""
    for reading in _READINGS.get((plain, *map(type, layers)), ()):
        leaves = _read(reading, layers)
        if leaves is not None:
            return leaves, reading.names.copy()
    return None


def _read(reading: _Reading, layers: list[Any]) -> list[Any] | None:
    leaves: list[Any] = []
    lengths: list[Any] = []
    try:
        for read, pick in reading.parts:
            if not read(pick(layers), leaves, lengths):
                return None
    except _UNEXPECTED:
        return None
    if reading.order is not None:
        leaves = list(reading.order(leaves))
    if torch.Tensor in map(type, lengths):  # in a trace, where each layer adds for itself, and none can be compared
        if reading.full is None:
            leaves.append(next(length for length in lengths if type(length) is torch.Tensor))
    elif lengths:
        if lengths.count(lengths[0]) != len(lengths) or not lengths[0]:
            return None  # to be reported, or made by hand
        if reading.full is None:
            leaves.append(length_leaf(lengths[0]) if reading.slides else lengths[0])
        elif key_count(leaves[reading.full]) != lengths[0]:
            return None
    return leaves


def learn(
    layers: list[Any], plain: bool, reads: list[LayerRead], names: list[str], full: int | None, slides: bool
) -> None:
    """Keep how layers were read."""
    # full: the leaf that holds every token; `None` if there is none
    groups = _grouped([read[:3] for read in reads])
    parts = [(reader(*read), _pick(indices)) for read, indices in groups.items()]
    order = _order_of_leaves([read.leaf_count for read in reads], groups.values())
    classes = (plain, *map(type, layers))
    kept = _READINGS.get(classes, ())
    _READINGS[classes] = (_Reading(parts, order, names, full, slides), *kept[: _KEPT_READINGS - 1])


def _order_of_leaves(counts: list[int], groups: Iterable[list[int]]) -> Pick | None:
    groups = list(groups)
    if len(groups) == 1:
        return None
    owners = [index for group in groups for index in group for _ in range(counts[index])]
    # stable, so that the leaves of one layer stay in their order
    order = sorted(range(len(owners)), key=owners.__getitem__)
    return _pick(order) if order else None


def key_count(keys: torch.Tensor) -> int:
    """Count the tokens that the keys of a full layer hold."""
    # transformers fills a layer with a one-dimensional empty tensor before its first update
    return keys.shape[-2] if keys.dim() > 1 else 0


class _ObjectReading(NamedTuple):
    read: Callable[..., bool]
    template: str
    paths: list[str]


_OBJECTS: dict[type, tuple[_ObjectReading, ...]] = {}


def read_object(obj: object, without: Container[str] = ()) -> tuple[str, list[str], list[Any]]:
    """Flatten one object by its attributes."""
    cls: Any = type(obj)
    for reading in _OBJECTS.get(cls, ()):
        leaves: list[Any] = []
        with contextlib.suppress(*_UNEXPECTED):
            if reading.read((obj,), leaves, []):
                return reading.template, reading.paths.copy(), leaves
    held = vars(obj)
    own = {name: value for name, value in held.items() if name not in without}
    if PLACEHOLDERS in held:
        template: Template = held[PLACEHOLDERS]
        leaves = follow_state(template, own)
    else:
        template, leaves = read_state(own)
    dumped, paths = json.dumps(template), leaf_paths(template)
    if PLACEHOLDERS not in held and is_rule(leaves):
        reading = _ObjectReading(reader(cls, tuple(held), dumped), dumped, paths)
        _OBJECTS[cls] = (reading, *_OBJECTS.get(cls, ())[: _KEPT_READINGS - 1])
    return dumped, paths.copy(), leaves


def is_rule(leaves: Iterable[Any]) -> bool:
    """Return whether others will be read like what holds these: not what stands in for leaves, also in a trace."""
    return all(type(leaf) in (torch.Tensor, int) for leaf in leaves)


# -- building --------------------------------------------------------------------------------------------------------


class LayerBuild(NamedTuple):
    """How a layer is built: what its function is made from, and where its leaves are."""

    cls: Any
    template: str  # as JSON
    empty: Callable[[], Any] | None  # makes it, instead, when it holds nothing
    leaves: list[int]


@functools.lru_cache(maxsize=1024)
def object_builder(cls: type, template: str) -> Callable[[Sequence[Any]], Any]:
    """Make the function that builds one object around its leaves; ``None`` when they are not what its leaves are."""
    new: Any = builtin_base(cls).__new__
    fill, count = filler(cls, template), len(leaf_types(read_template(template)))

    def build_one(leaves: Sequence[Any]) -> Any:
        if len(leaves) != count:
            return None
        obj = new(cls)
        with contextlib.suppress(*_UNEXPECTED):
            fill((obj,), 0, *zip(leaves, strict=True))
            return obj
        return None

    return build_one


class Builders:
    """Builds layers around leaves, all layers of a kind at once."""

    def __init__(self, layers: list[LayerBuild], leaf_count: int) -> None:
        filled = [index for index, layer in enumerate(layers) if layer.empty is None]
        groups = _grouped([layers[index][:2] for index in filled])
        self._leaf_count = leaf_count
        self._classes = [layer.cls for layer in layers]
        self._parts = [_part(layers, [filled[i] for i in group]) for group in groups.values()]
        self._empty = [(index, layer.empty) for index, layer in enumerate(layers) if layer.empty is not None]

    def __call__(self, values: Sequence[Any], length: Any) -> list[Any] | None:
        """Build the layers; ``None`` when the values are not what the leaves of such layers are."""
        if len(values) != self._leaf_count or type(length) is not int:
            return None
        try:
            layers = [object.__new__(cls) for cls in self._classes]  # dynamo of torch 2.11 follows no other name of it
            for fill, pick, columns in self._parts:
                fill(pick(layers), length, *[column(values) for column in columns])
            for index, make in self._empty:
                layers[index] = make()
        except _UNEXPECTED:
            return None
        return layers


def _part(layers: list[LayerBuild], indices: list[int]) -> tuple[Callable[..., None], Pick, list[Pick]]:
    """The function that fills layers of one kind, how to pick these layers, and how to pick their leaves."""
    first = layers[indices[0]]
    columns = zip(*(layers[index].leaves for index in indices), strict=True)
    return filler(first.cls, first.template), _pick(indices), [_pick(list(column)) for column in columns]


# -- both ------------------------------------------------------------------------------------------------------------


def _grouped(keys: Iterable[Hashable]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return groups


def _pick(indices: list[int]) -> Pick:
    """Pick several entries of a list. In Python, since dynamo of torch 2.13 does not follow an itemgetter."""
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    if indices == list(range(indices[0], indices[-1] + 1, step)):
        chosen = slice(indices[0], indices[-1] + 1, step)
        return lambda entries: entries[chosen]
    return lambda entries: [entries[index] for index in indices]
