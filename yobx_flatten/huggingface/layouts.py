"""A list of cache layers to leaves and names, and back. Names are static: they say all that a program relies on.

Caches are taken apart and put together at every call of a program, so what only depends on the layout (classes,
windows, lengths of static layers) is worked out once per layout: the names for a list of layers, a plan for a list of
names. The slow way, layer by layer, is for everything unusual (layers that hold nothing, placeholders, traces).
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ..errors import CacheStructureError, SpecMismatchError
from ..static_codec import locate
from .layers import PLACEHOLDERS, LayerKind, code_of, kind_of, kind_of_code, remember, window_tensor
from .state import Template, build_state, follow_state, leaf_paths, read_state

__all__ = ["LENGTH", "flatten_layers", "is_leaf_name", "rebuild_by_attributes", "unflatten_layers"]

LENGTH = "length"
_UNSET: Any = object()  # not None, which may stand for any leaf


def flatten_layers(layers: list[Any], *, plain: bool) -> tuple[list[Any], list[str]]:
    """Take layers apart.

    Args:
        layers: of any classes; those without a row in :mod:`yobx_flatten.huggingface.layers` by their attributes.
        plain: layers that are all ``DynamicLayer`` get names without a letter.

    Returns:
        The layers' own tensors and counters, and their names (layers that hold nothing have a name and no leaf).

    Raises:
        CacheStructureError: when a layer is half-initialised, or layers have not seen the same tokens.
        StaticDataError: when a layer without a row has an attribute that cannot be stored.
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
    windows: list[int]  # one layer for each window


class _Classes(NamedTuple):
    """How to read caches with layers of these classes, with ``itemgetter``: several layers or attributes at once."""

    leaves: list[Any]  # one for every leaf of a layer: attributes of a layer -> leaf
    flag: Any  # attributes of a layer -> is_initialized; None for versions without
    with_parameters: Any  # attributes of all layers -> those of the layers that have static parameters
    parameters: Any  # attributes of such a layer -> its parameters
    counting: Any  # attributes of all layers -> those of the layers that count tokens in an integer
    count: Any  # attributes of such a layer -> its count
    full: int | None  # the layer whose keys hold every token
    layouts: dict[Any, _Layout]  # by the parameters


_CLASSES: dict[Any, _Classes | None] = {}


def _flatten_filled(layers: list[Any], plain: bool) -> tuple[list[Any], list[str]] | None:
    """The common case: every layer is filled with tensors and has the same leaves as the others.

    Reads one attribute of all layers at a time, which is several times quicker than one layer at a time.
    """
    held = [layer.__dict__ for layer in layers]
    classes = (plain, *map(type, layers))
    known = _CLASSES.get(classes, _UNSET)
    if known is _UNSET:
        known = _CLASSES[classes] = _read_classes(layers)
    if known is None or (known.flag is not None and False in map(known.flag, held)):
        return None
    step = len(known.leaves)
    leaves: list[Any] = [None] * (step * len(held))
    for index, read in enumerate(known.leaves):
        leaves[index::step] = map(read, held)
    if type(None) in set(map(type, leaves)):
        return None
    signature = None if known.parameters is None else tuple(map(known.parameters, known.with_parameters(held)))
    layout = known.layouts.get(signature)
    if layout is None:
        layout = known.layouts[signature] = _read_layout(layers, plain)
    if known.count is not None:
        lengths = list(map(known.count, known.counting(held)))
        length = lengths[0]
        if type(length) is not int or lengths.count(length) != len(lengths):
            return None  # symbols of a trace, or a disagreement to be reported
        if known.full is None:
            leaves.append(length)
        else:
            full = leaves[known.full * step]
            if type(full) is not torch.Tensor or _key_count(full) != length:
                return None
        for index in layout.windows:
            remember(held[index])
    return leaves, layout.names.copy()


def _read_classes(layers: list[Any]) -> _Classes | None:
    """Work out how layers of these classes are read; ``None`` when they do not all have the same leaves."""
    kinds = [kind for kind in map(kind_of, map(type, layers)) if kind is not None]
    if len(kinds) < len(layers) or len({(kind.has_position, kind.is_static) for kind in kinds}) != 1:
        return None
    first = kinds[0]
    attributes = ("keys", "values", "cumulative_length") if first.has_position else ("keys", "values")
    with_parameters = [index for index, kind in enumerate(kinds) if kind.parameters]
    counting = [index for index, kind in enumerate(kinds) if kind.counter is not None]
    return _Classes(
        leaves=[operator.itemgetter(attribute) for attribute in attributes],
        flag=operator.itemgetter("is_initialized") if first.has_flag else None,
        with_parameters=_pick(with_parameters),
        parameters=operator.itemgetter(*kinds[with_parameters[0]].parameters) if with_parameters else None,
        counting=_pick(counting),
        count=operator.itemgetter(kinds[counting[0]].counter) if counting else None,
        full=next((index for index, kind in enumerate(kinds) if kind.letter == "D"), None),
        layouts={},
    )


def _pick(indices: list[int]) -> Any:
    """Pick several entries of a list; a bare itemgetter of one index would not return a sequence."""
    return operator.itemgetter(*indices) if len(indices) > 1 else lambda held: [held[index] for index in indices]


def _read_layout(layers: list[Any], plain: bool) -> _Layout:
    """Work out the names of these layers."""
    kinds = [kind for kind in map(kind_of, map(type, layers)) if kind is not None]
    if plain and all(kind.letter == "D" for kind in kinds):
        return _Layout(list(_plain_names(len(kinds))), [])
    names: list[str] = []
    windows: dict[Any, int] = {}
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        names += _names(kind, kind.code(layer), index)
        if kind.letter == "W":
            windows[layer.sliding_window] = index
    letters = {kind.letter for kind in kinds}
    if any(kind.counter is not None for kind in kinds) and "D" not in letters:
        names.append(LENGTH)
    return _Layout(names, list(windows.values()))


def _flatten_one_by_one(layers: list[Any], plain: bool) -> tuple[list[Any], list[str]]:
    values: list[Any] = []
    names: list[str] = []
    full: Any = _UNSET  # keys of the first filled DynamicLayer, which hold every token
    seen: Any = _UNSET  # what the layers counted that do not hold every token
    first = ("", "")  # the first of them
    for index, layer in enumerate(layers):
        kind = kind_of(type(layer))
        if kind is None:
            code, lengths = _flatten_by_attributes(layer, index, values, names)
        else:
            code, lengths = kind.code(layer), []
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
                remember(vars(layer))
                lengths = [vars(layer)[kind.counter]]
        for length in lengths:
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
    if plain and len(values) == 2 * len(layers) and all(_is_full(name) for name in names):
        names = list(_plain_names(len(layers)))
    return values, names


def _is_full(name: str) -> bool:
    return name.startswith(("key_D_", "value_D_"))


def _flatten_by_attributes(layer: Any, index: int, values: list[Any], names: list[str]) -> tuple[str, list[Any]]:
    """Add the leaves of a layer without a row; return its code and what it counted."""
    held, cls = vars(layer), type(layer)
    remember(held)
    template = held.get(PLACEHOLDERS)
    if template is None:
        template, leaves = read_state(held, in_cache=True)
    else:
        leaves = follow_state(template, held)
    code = code_of(layer)
    # says how to rebuild the layer, and stands for no leaf
    names.append(f"layer_{index}={cls.__module__}:{cls.__qualname__}={json.dumps(template)}")
    names += [f"{_PARTS.get(path, path)}_{code}_{index}" for path in leaf_paths(template)]
    values += leaves
    # a layer that holds nothing yet has seen nothing, whatever the others have
    counted = [held[name] for name, entry in template.items() if entry == ["length"] and leaves]
    return code, counted


_PARTS = {"keys": "key", "values": "value", "cumulative_length": "position"}


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
    leaf_names = [name for name in names if is_leaf_name(name)]
    counts_itself = LENGTH in leaf_names
    counter = next(
        (i for i, name in enumerate(leaf_names) if name == LENGTH or (not counts_itself and name.startswith("key_D_"))),
        None,
    )
    positions = {name.rsplit("_", 1)[1] for name in names if name.startswith("position_")}
    rebuilds: list[Any] = []
    by_attributes: set[str] = set()
    for name in names:
        part, _, rest = name.partition("_")
        if part == "layer":
            index, cls, template = rest.split("=", 2)
            by_attributes.add(index)
            rebuilds.append(functools.partial(rebuild_by_attributes, locate(cls), json.loads(template)))
            continue
        code, _, index = rest.rpartition("_")
        if part not in ("key", "none") or index in by_attributes:
            continue
        kind, parameter = kind_of_code(code)
        if part == "none":
            rebuilds.append(functools.partial(_rebuild_empty, kind, parameter))
        else:
            rebuilds.append(_rebuilder(kind, parameter, index in positions))
    return _Plan(len(leaf_names), counter, counts_itself, rebuilds)


def is_leaf_name(name: str) -> bool:
    """Tell whether a name stands for a leaf; the others say how something is rebuilt."""
    return not name.startswith("none_") and "=" not in name


def rebuild_by_attributes(cls: type, template: Template, leaves: Iterator[Any], length: Any) -> Any:
    """Build an object without a row around its leaves."""
    obj: Any = object.__new__(cls)
    held, used, real = build_state(template, leaves, length)
    obj.__dict__.update(held)
    if not real:
        held = obj.__dict__
        held[PLACEHOLDERS] = template
    window = held.get("sliding_window")
    if isinstance(window, int) and "cumulative_length" in held:
        device = held.get("device")
        tensor = window_tensor(window, device if isinstance(device, torch.device) else torch.device("cpu"))
        if tensor is not None:
            obj._sliding_window_tensor = tensor
        elif not used:  # a layer that holds nothing yet needs it for its first update
            obj._sliding_window_tensor = torch.tensor(window, dtype=torch.long)
    return obj


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
