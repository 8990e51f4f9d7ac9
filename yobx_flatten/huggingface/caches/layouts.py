"""Flatten cache layers to leaves with static names, and rebuild layers from leaves.

A layer may be empty, or contain tensors, placeholders or the proxies of a trace.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ...core.private_names.of_torch import functorch, is_jit_tracing
from ...errors import CacheStructureError, SpecMismatchError
from ...registry.recipe.aliases import CacheLayer, Length
from ...trace.program import StoredInteger
from .known_state import read_known_state, read_template
from .layers import PLACEHOLDERS, LayerKind, code_of, kind_of, kind_of_code, make_window_tensor, remember
from .state import LENGTHS, StateBuilder, follow_state, layer_class, leaf_paths, lengths_of

LENGTH = "length"
_UNSET: Any = object()  # not None, which may be a leaf


def flatten_layers(layers: list[Any], *, plain: bool) -> tuple[list[Any], list[str]]:
    """Flatten the layers of a cache to leaves and leaf names. All layers must have seen the same number of tokens."""
    # plain: whether names have no letter if all layers are `DynamicLayer`
    values: list[Any] = []
    names: list[str] = []
    full: int | None = None  # keys of the first filled DynamicLayer, which contain every token
    slides = real = True
    seen: Any = _UNSET  # the counter of the layers that do not store every token
    first = ("", "")  # the first of these layers
    uncounted: list[tuple[int, str, str]] = []  # the number of keys of filled layers whose counter is 0
    for index, layer in enumerate(layers):
        cls = type(layer)
        kind = kind_of(cls)
        if kind is not None and not kind.knows(layer):
            kind = None
        count = len(values)
        if kind is None:
            code, lengths = _read_attributes(layer, index, values, names)
        else:
            code, lengths = _read_row(kind, layer, index, values, names)
            if kind.letter == "D" and full is None and len(values) > count:
                full = count
        slides_by_class = cls.__name__ in _SLIDING and cls.__module__ == "transformers.cache_utils"
        slides = slides and (not lengths or slides_by_class)
        real = real and PLACEHOLDERS not in vars(layer)
        for length in lengths:
            held = _held_uncounted(layer, length)
            if held:
                uncounted.append((held, f"layers[{index}]", code))
            elif seen is _UNSET:
                seen, first = length, (f"layers[{index}]", code)
            else:
                _check_agreement(seen, length, f"layers[{index}]", code)
    if uncounted:
        whole = values[full] if full is not None else None
        if seen is _UNSET:
            seen = _key_count(whole) if isinstance(whole, torch.Tensor) else max(held for held, _, _ in uncounted)
        for held, place, code in uncounted:
            if type(seen) is int and held > seen:
                _check_agreement(seen, 0, place, code)
    if seen is not _UNSET:
        if full is None:
            values.append(length_leaf(seen) if slides and real else seen)
            names.append(LENGTH)
        elif isinstance(values[full], torch.Tensor):
            _check_agreement(_key_count(values[full]), seen, *first)
    if plain and len(values) == 2 * len(layers) and all(name.startswith(("key_D_", "value_D_")) for name in names):
        names = list(_plain_names(len(layers)))
    return values, names


def unflatten_layers(values: Iterable[Any], names: list[str]) -> list[Any]:
    values = values if isinstance(values, (list, tuple)) else list(values)
    plan = rebuild_plan(names)
    if len(values) != plan.leaf_count:
        raise SpecMismatchError(
            f"A KV cache with the leaves {names} was given {len(values)} values instead of {plan.leaf_count}."
        )
    length: Any = 0
    if plan.counts_itself:
        length = values[-1]
        # if other leaves are placeholders, the length is a placeholder of any type
        if all(map(isinstance, values, plan.leaf_types)):
            length = length_of(length)
    elif plan.counter is not None and isinstance(values[plan.counter], torch.Tensor):
        length = _key_count(values[plan.counter])
    leaves = iter(values)
    return [rebuild(leaves, length) for rebuild in plan.rebuilds]


def hold_length_leaf(layers: list[Any]) -> None:
    """Store the token count of sliding layers as a tensor, so that flattening twice returns the same tensor."""
    values, names = flatten_layers(layers, plain=True)
    if names[-1:] != [LENGTH] or not isinstance(values[-1], torch.Tensor):
        return
    for layer in layers:
        held = vars(layer)
        if held.get("keys") is not None:
            held.update(dict.fromkeys((name for name in LENGTHS if type(held.get(name)) is int), values[-1]))


def _read_row(
    kind: LayerKind, layer: CacheLayer, index: int, values: list[Any], names: list[str]
) -> tuple[str, list[Any]]:
    # appends leaves to `values`; returns the code of the layer in leaf names, such as `W8`, and its token counters
    code = kind.code(layer)
    if not kind.is_filled(layer, index):
        names.append(f"none_{code}_{index}")
        return code, []
    values += (layer.keys, layer.values)
    names += (f"key_{code}_{index}", f"value_{code}_{index}")
    if kind.has_position:
        values.append(layer.cumulative_length)
        names.append(f"position_{code}_{index}")
    if kind.counter is None:
        return code, []
    remember(layer.__dict__)
    return code, [vars(layer)[kind.counter]]


def _held_uncounted(layer: CacheLayer, length: Length) -> int:
    """Return the number of keys in a layer that has keys although its token counter is 0; else return 0."""
    held = vars(layer)
    keys = held.get("keys")
    if type(length) is not int or length or "max_cache_len" in held or type(keys) is not torch.Tensor:
        return 0
    count = _key_count(keys)
    return count if type(count) is int else 0


def _key_count(keys: torch.Tensor) -> int:
    # transformers fills a layer with a one-dimensional empty tensor before its first update
    return keys.shape[-2] if keys.dim() > 1 else 0


def _read_attributes(layer: CacheLayer, index: int, values: list[Any], names: list[str]) -> tuple[str, list[Any]]:
    held, cls = layer.__dict__, type(layer)
    remember(held)
    template = held.get(PLACEHOLDERS)
    if template is not None:
        code = code_of(layer)
        leaves = follow_state(template, held)
        names += _names_of_state(cls, code, index, json.dumps(template), leaf_paths(template))
        lengths = lengths_of(template)
    else:
        state, leaves = read_known_state((cls, index), held, in_cache=True)
        if not state.names:
            state.code = code_of(layer)
            state.names = _names_of_state(cls, state.code, index, state.text, state.paths)
        names += state.names
        code, lengths = state.code, state.lengths
    values += leaves
    # an empty layer has seen no tokens
    return code, [held[name] for name in lengths] if leaves else []


def _names_of_state(cls: type, code: str, index: int, text: str, paths: list[str]) -> list[str]:
    # the first name describes the layer; it is not the name of a leaf
    parts = {"keys": "key", "values": "value", "cumulative_length": "position"}
    leaf_names = [f"{parts.get(path, path)}_{code}_{index}" for path in paths]
    return [f"layer_{index}={cls.__module__}:{cls.__qualname__}={text}", *leaf_names]


@functools.cache
def _plain_names(count: int) -> tuple[str, ...]:
    return tuple(f"{part}_{index}" for index in range(count) for part in ("key", "value"))


def _check_agreement(expected: Length, found: Length, place: str, code: str) -> None:
    # in a trace both are symbols; comparing them would add a guard to the program
    if type(expected) is int and type(found) is int and expected != found:
        raise CacheStructureError(
            f"The layers of this cache have seen different numbers of tokens: {expected} and, in {place} ({code}), "
            f"{found}. Generation cannot continue from this cache: fill every layer with the same number of tokens."
        )


class _Plan(NamedTuple):
    leaf_count: int
    leaf_types: list[Any]  # the classes of leaves, which placeholders do not have
    counts_itself: bool  # whether the last leaf is the number of tokens seen
    counter: int | None  # otherwise the leaf with the keys of a full layer, which contain every token
    rebuilds: list[Callable[[Iterator[Any], Any], CacheLayer]]  # functions of the leaves and the length
    full_only: bool  # whether all layers are a `DynamicLayer`


_RECENT: list[tuple[list[str], _Plan]] = []  # at most eight plans, the newest first


def rebuild_plan(names: list[str]) -> _Plan:
    # names mostly equal those of the last call, and a comparison is faster than a hash
    for known, plan in _RECENT:
        if known == names:
            return plan
    plan = _make_plan(tuple(names))
    _RECENT[:] = [(list(names), plan), *_RECENT[:7]]
    return plan


@functools.lru_cache(maxsize=1024)
def _make_plan(names: tuple[str, ...]) -> _Plan:
    if names == _plain_names(len(names) // 2):
        names = tuple(f"{part}_D_{index}" for index in range(len(names) // 2) for part in ("key", "value"))
    leaf_names = [name for name in names if is_leaf_name(name)]
    counts_itself = LENGTH in leaf_names
    counter = next((i for i, name in enumerate(leaf_names) if name.startswith("key_D_")), None)
    positions = {name.rsplit("_", 1)[1] for name in names if name.startswith("position_")}
    classes: set[type] = set()
    types: list[Any] = []
    rebuilds: list[Any] = []
    by_attributes: set[str] = set()
    for name in names:
        part, _, rest = name.partition("_")
        if part == "layer":
            index, cls_name, dumped = rest.split("=", 2)
            by_attributes.add(index)
            cls, template = layer_class(cls_name), read_template(dumped)
        else:
            code, _, index = rest.rpartition("_")
            if part not in ("key", "none") or index in by_attributes:
                continue
            kind, parameter = kind_of_code(code)
            cls = kind.cls
            if part == "none":
                classes.add(cls)
                rebuilds.append(lambda leaves, length, kind=kind, parameter=parameter: kind.empty(parameter))
                continue
            template = kind.template(parameter, has_position=index in positions)
        builder = StateBuilder(template)
        classes.add(cls)
        types += builder.leaf_types
        rebuilds.append(functools.partial(rebuild_by_attributes, cls, builder))
    if counts_itself:
        types.append(torch.Tensor)
    return _Plan(len(leaf_names), types, counts_itself, counter, rebuilds, classes <= {kind_of_code("D")[0].cls})


def is_leaf_name(name: str) -> bool:
    return not name.startswith("none_") and "=" not in name


def rebuild_by_attributes(
    cls: type, builder: StateBuilder, leaves: Iterator[Any], length: Length, new: Callable[[type], Any] = object.__new__
) -> CacheLayer:
    """Rebuild a cache layer, or a cache that has no layers, from its leaves and a template of its attributes."""
    obj = new(cls)
    held, used, real = builder.build(leaves, length)
    obj.__dict__.update(held)
    if not real:
        held = obj.__dict__
        held[PLACEHOLDERS] = builder.template
    window = held.get("sliding_window")
    if isinstance(window, int) and "cumulative_length" in held:
        device = held.get("device")
        device = device if isinstance(device, torch.device) else torch.device("cpu")
        # a torch placeholder may be on a device that this machine lacks
        plain = all(type(x) in (torch.Tensor, int) for x in used)
        tensor = make_window_tensor(cls, window, device) if plain else None
        if tensor is not None:
            obj._sliding_window_tensor = tensor
        elif not used and _makes_window_tensor(cls):  # an empty layer needs the tensor for its first update
            obj._sliding_window_tensor = torch.tensor(window, dtype=torch.long)
    return obj


@functools.cache
def _makes_window_tensor(cls: type) -> bool:
    makers = [inspect.unwrap(vars(base)["__init__"]) for base in cls.__mro__ if "__init__" in vars(base)]
    return any("_sliding_window_tensor" in one.__code__.co_names for one in makers if hasattr(one, "__code__"))


# sliding layers whose token count may be a tensor in a trace, where their methods are replaced; classes of model code
# count in integers there
_SLIDING = {
    "DynamicSlidingWindowLayer",
    "StaticSlidingWindowLayer",
    "SlidingWindowLayer",  # transformers 4.56
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
}


# The number of tokens that sliding layers have seen is a 0-d tensor among the leaves.
#
# The layers count in a Python integer. ExecuTorch, AOTInductor and submodules do not accept integer inputs, but all
# accept tensors. The tensor stays on the CPU, where reading it does not wait for a device.
#
#     layer.cumulative_length    12  -- flatten -->  tensor(12)  -- unflatten -->  12
#     the same in a trace     a symbol  ---------->  an operator's tensor  ----->  the tensor: it has no value yet


def length_leaf(seen: int | torch.SymInt | torch.Tensor | StoredInteger) -> Any:
    # seen: the counter of a layer: an integer; in a trace a symbol, or the leaf from unflatten
    if isinstance(seen, StoredInteger):
        return int(seen)
    if torch.compiler.is_dynamo_compiling():
        return seen  # compiled code needs the number, and cannot read it from a tensor
    if type(seen) is int or type(seen) is torch.SymInt:
        # an operator in a trace, where a new tensor would be a constant of the program
        return torch.full((), seen, dtype=torch.int64, device="cpu")  # type: ignore[arg-type] # a symbol also works
    return seen


def length_of(leaf: object) -> object:
    """Convert the leaf ``length`` of a cache to an integer. A leaf without a known value is returned unchanged."""
    # leaf: an int64 tensor without axes; an integer, as stored by earlier versions; a placeholder
    has_no_value = torch.compiler.is_compiling() or is_jit_tracing()
    if has_no_value or not isinstance(leaf, torch.Tensor) or leaf.dim():
        return leaf
    plain = leaf
    while functorch.is_functorch_wrapped_tensor(plain):  # vmap: the counts of several caches
        plain = functorch.get_unwrapped(plain)
    if type(plain) is not torch.Tensor or plain.is_meta:  # fake, functional, ...
        return leaf
    numbers = {plain.item()} if not plain.dim() else set(plain.reshape(-1).tolist())
    number = numbers.pop() if len(numbers) == 1 else None
    # leaves of another dtype, or gradients, also arrive here
    if type(number) is int or (type(number) is float and number.is_integer()):
        return int(number)
    return leaf
