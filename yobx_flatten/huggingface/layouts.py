"""A list of cache layers to leaves and names, and back. Names are static: they say all that a program relies on.

Caches are taken apart and put together at every call of a program, so what only depends on the layout (classes,
windows, lengths of static layers) is worked out once per layout: the names for a list of layers, a plan for a list of
names. The slow way, layer by layer, is for everything unusual (layers that hold nothing, placeholders, traces).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ..errors import CacheStructureError, SpecMismatchError, UnsupportedLayerError
from .layers import PLACEHOLDERS, LayerKind, kind_of, kind_of_code, window_tensor

__all__ = ["LENGTH", "flatten_layers", "unflatten_layers"]

LENGTH = "length"
_UNSET: Any = object()  # not None, which may stand for any leaf


def flatten_layers(layers: list[Any], *, plain: bool) -> tuple[list[Any], list[str]]:
    """Take layers apart.

    Args:
        layers: of any classes in the table of :mod:`yobx_flatten.huggingface.layers`.
        plain: layers that are all ``DynamicLayer`` get names without a letter.

    Returns:
        The layers' own tensors and counters, and their names (layers that hold nothing have a name and no leaf).

    Raises:
        CacheStructureError: when a layer is half-initialised, or layers have not seen the same tokens.
        UnsupportedLayerError: when a layer's class is not in the table.
    """
    quick = _flatten_filled(layers, plain)
    return quick if quick is not None else _flatten_one_by_one(layers, plain)


def unflatten_layers(values: Iterable[Any], names: list[str]) -> list[Any]:
    """Put layers together around their leaves.

    Args:
        values: the leaves, or placeholders for them.
        names: as :func:`flatten_layers` returned them.

    Returns:
        The layers.

    Raises:
        SpecMismatchError: when there are not as many values as names of leaves.
        UnsupportedLayerError: when a name has a letter that no class has.
    """
    values = values if isinstance(values, (list, tuple)) else list(values)
    plan = _plan(tuple(names))
    if len(values) != plan.leaf_count:
        raise SpecMismatchError(
            f"A cache with the leaves {names} was given {len(values)} values instead of {plan.leaf_count}."
        )
    length = 0
    if plan.counter is not None:
        length = values[plan.counter]
        if not plan.counts_itself:  # it is the keys of a full layer, which hold every token
            length = _key_count(length) if isinstance(length, torch.Tensor) else 0
    leaves = iter(values)
    return [rebuild(leaves, length) for rebuild in plan.rebuilds]


# -- apart -----------------------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """What is the same for all caches with layers of these classes and parameters."""

    names: list[str]
    attributes: tuple[str, ...]  # of every layer, in the order of its leaves
    counters: list[tuple[int, str]]  # layers that count tokens in an integer, and its attribute
    full: int | None  # the layer whose keys hold every token
    windows: list[int]  # one layer for each window


_LAYOUTS: dict[Any, _Layout | None] = {}


def _flatten_filled(layers: list[Any], plain: bool) -> tuple[list[Any], list[str]] | None:
    """The common case: every layer is filled with tensors and has the same leaves as the others."""
    held = [layer.__dict__ for layer in layers]
    classes = tuple(map(type, layers))
    signature: Any = classes
    if len(set(classes)) > 1 or not (classes and classes[0].__name__ == "DynamicLayer"):
        # a column per attribute: quicker than a loop over the layers
        signature = (
            classes,
            tuple([h.get("sliding_window") for h in held]),
            tuple([h.get("max_cache_len") for h in held]),
            tuple([h.get("record_past") for h in held]),
        )
    key = (plain, signature)
    layout = _LAYOUTS.get(key, _UNSET)
    if layout is _UNSET:
        layout = _LAYOUTS[key] = _read_layout(layers, plain)
    if layout is None:
        return None
    attributes = layout.attributes
    columns = [[h[attribute] for h in held] for attribute in attributes]
    if type(None) in {type(leaf) for column in columns for leaf in column}:
        return None
    if not all([h.get("is_initialized", True) for h in held]):  # noqa: C419 # a list is quicker than a generator here
        return None
    leaves: list[Any] = [None] * (len(attributes) * len(held))
    for index, column in enumerate(columns):
        leaves[index :: len(attributes)] = column
    if layout.counters:
        lengths = [held[index][attribute] for index, attribute in layout.counters]
        length = lengths[0]
        full = None if layout.full is None else held[layout.full]["keys"]
        if type(length) is not int or lengths.count(length) != len(lengths):
            return None  # symbols of a trace, or a disagreement to be reported
        if full is None:
            leaves.append(length)
        elif type(full) is not torch.Tensor or _key_count(full) != length:
            return None
        for index in layout.windows:
            kind_of(classes[index]).remember(layers[index])
    return leaves, layout.names.copy()


def _read_layout(layers: list[Any], plain: bool) -> _Layout | None:
    """Work a layout out; ``None`` when its layers have different leaves."""
    kinds = [_kind_at(layers, index) for index in range(len(layers))]
    if len({kind.has_position for kind in kinds}) > 1:
        return None
    attributes = ("keys", "values", "cumulative_length") if kinds and kinds[0].has_position else ("keys", "values")
    names: list[str] = []
    windows: dict[Any, int] = {}
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        names += _names(kind, kind.code(layer), index)
        if kind.letter == "W":
            windows[layer.sliding_window] = index
    full = next((index for index, kind in enumerate(kinds) if kind.letter == "D"), None)
    counters = [(index, kind.counter) for index, kind in enumerate(kinds) if kind.counter is not None]
    if counters and full is None:
        names.append(LENGTH)
    if plain and all(kind.letter == "D" for kind in kinds):
        names = list(_plain_names(len(kinds)))
    return _Layout(names, attributes, counters, full, list(windows.values()))


def _flatten_one_by_one(layers: list[Any], plain: bool) -> tuple[list[Any], list[str]]:
    values: list[Any] = []
    names: list[str] = []
    full: Any = _UNSET  # keys of the first filled DynamicLayer, which hold every token
    seen: Any = _UNSET  # what the sliding layers counted
    first = ("", "")  # the first of them
    for index, layer in enumerate(layers):
        kind = _kind_at(layers, index)
        code = kind.code(layer)
        if not kind.is_filled(layer, index):
            names.append(f"none_{code}_{index}")
            continue
        values += (layer.keys, layer.values)
        if kind.has_position:
            values.append(layer.cumulative_length)
        names += _names(kind, code, index)
        if kind.letter == "D" and full is _UNSET:
            full = layer.keys
        elif kind.counter is not None:
            kind.remember(layer)
            length = vars(layer)[kind.counter]
            if seen is _UNSET:
                seen, first = length, (f"layers[{index}]", code)
            else:
                _check_agreement(seen, length, f"layers[{index}]", code)
    if seen is not _UNSET:
        if full is _UNSET:
            values.append(seen)
            names.append(LENGTH)
        elif isinstance(full, torch.Tensor):
            _check_agreement(_key_count(full), seen, *first)
    if plain and len(values) == 2 * len(layers) and all(name.split("_")[1] == "D" for name in names):
        names = list(_plain_names(len(layers)))
    return values, names


def _kind_at(layers: list[Any], index: int) -> LayerKind:
    try:
        return kind_of(type(layers[index]))
    except UnsupportedLayerError as error:
        raise UnsupportedLayerError(f"layers[{index}]: {error}") from None


def _names(kind: LayerKind, code: str, index: int) -> list[str]:
    parts = ("key", "value", "position") if kind.has_position else ("key", "value")
    return [f"{part}_{code}_{index}" for part in parts]


@functools.cache
def _plain_names(count: int) -> tuple[str, ...]:
    return tuple(f"{part}_{index}" for index in range(count) for part in ("key", "value"))


def _key_count(keys: torch.Tensor) -> Any:
    # transformers fills a layer with a one-dimensional empty tensor before its first update
    return keys.shape[-2] if keys.dim() > 1 else 0


def _check_agreement(expected: Any, found: Any, place: str, code: str) -> None:
    """All layers of a cache saw the same tokens: one count serves them all."""
    # in a trace both are symbols; comparing them would add a guard to the program
    if type(expected) is int and type(found) is int and expected != found:
        raise CacheStructureError(
            f"The layers of this cache have seen different numbers of tokens: {expected} and, in {place} ({code}), "
            f"{found}. Such a cache cannot go on generating; fill every layer with the same tokens."
        )


# -- together --------------------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """How to rebuild the layers that a list of names stands for."""

    leaf_count: int
    counter: int | None  # the leaf that tells how many tokens were seen
    counts_itself: bool  # it is that number, not the keys of a full layer
    rebuilds: list[Any]  # (iterator over leaves, length) -> layer


@functools.lru_cache(maxsize=1024)
def _plan(names: tuple[str, ...]) -> _Plan:
    if names == _plain_names(len(names) // 2):
        kind, _ = kind_of_code("D")
        return _Plan(len(names), None, False, [_rebuilder(kind, "", False)] * (len(names) // 2))
    leaf_names = [name for name in names if not name.startswith("none_")]
    counts_itself = LENGTH in leaf_names
    counter = next(
        (i for i, name in enumerate(leaf_names) if name == LENGTH or (not counts_itself and name.startswith("key_D_"))),
        None,
    )
    positions = {name.rsplit("_", 1)[1] for name in names if name.startswith("position_")}
    rebuilds = []
    for name in names:
        part, _, rest = name.partition("_")
        if part not in ("key", "none"):
            continue
        code, _, index = rest.rpartition("_")
        kind, parameter = kind_of_code(code)
        if part == "none":
            rebuilds.append(functools.partial(_rebuild_empty, kind, parameter))
        else:
            rebuilds.append(_rebuilder(kind, parameter, index in positions))
    return _Plan(len(leaf_names), counter, counts_itself, rebuilds)


def _rebuild_empty(kind: LayerKind, parameter: str, leaves: Iterator[Any], length: Any) -> Any:
    return kind.empty(parameter)


def _rebuilder(kind: LayerKind, parameter: str, has_position: bool) -> Any:
    """Make the function that builds one layer around its leaves: no copy, no ``__init__``, no tensor made."""
    cls, fixed, counter = kind.cls, kind.fixed(parameter), kind.counter
    derived = kind.derived_attributes()
    window = fixed.get("sliding_window")
    new, tensor = object.__new__, torch.Tensor

    def rebuild(leaves: Iterator[Any], length: Any) -> Any:
        layer: Any = new(cls)
        keys, values = next(leaves), next(leaves)
        layer.__dict__ = held = {"keys": keys, "values": values, **fixed}
        if has_position:
            held["cumulative_length"] = next(leaves)
        if counter is not None:
            held[counter] = length
        if isinstance(keys, tensor):
            held["dtype"], held["device"] = keys.dtype, keys.device
            if window is not None:
                remembered = window_tensor(window, held["device"])
                if remembered is not None:
                    held["_sliding_window_tensor"] = remembered
            if derived and isinstance(values, tensor) and keys.dim() > 3:
                for name, read in derived:
                    held[name] = read(keys, values)
        if keys is None or values is None:
            held[PLACEHOLDERS] = True
        return layer

    return rebuild
