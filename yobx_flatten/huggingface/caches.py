"""Caches as nodes: ``DynamicCache``, ``StaticCache``, ``EncoderDecoderCache``.

The static part of a cache is the list of its leaves' names. A cache of ``DynamicLayer`` only has the plain names
``key_0, value_0, key_1, ...``; any other cache says for every layer what it is: ``key_D_0, value_D_0, key_W8_1, ...``
(letters in :mod:`yobx_flatten.huggingface.layers`). A layer that holds nothing yet keeps its place as ``none_W8_1``.

Nothing that depends on the tokens seen is static, so one exported program serves all lengths. Where the *length* of
sliding layers comes from:

* a full layer beside them holds every token: its number of keys *is* the length, and no leaf is needed;
* otherwise one integer leaf, ``length``, stands at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import MappingKey

from ..errors import CacheStructureError, SpecMismatchError, UnsupportedLayerError
from .layers import PLACEHOLDERS, kind_of, kind_of_code

__all__ = [
    "flatten_dynamic_cache",
    "flatten_encoder_decoder_cache",
    "flatten_static_cache",
    "flatten_with_keys_dynamic_cache",
    "flatten_with_keys_encoder_decoder_cache",
    "flatten_with_keys_static_cache",
    "unflatten_dynamic_cache",
    "unflatten_encoder_decoder_cache",
    "unflatten_static_cache",
]

_LENGTH = "length"
_UNSET: Any = object()  # not None, which may stand for any leaf


def flatten_dynamic_cache(cache: Any) -> tuple[list[Any], list[str]]:
    """Take a ``DynamicCache`` apart.

    Args:
        cache: a ``transformers.DynamicCache`` whose layers are ``DynamicLayer`` or ``DynamicSlidingWindowLayer``.

    Returns:
        The cache's own tensors, each of shape (batch, heads, length, head size), and their names.

    Raises:
        CacheStructureError: when a layer is half-initialised, or sliding layers have not seen what full layers hold.
        UnsupportedLayerError: when a layer is of another class.
    """
    layers = _layers_of(cache)
    plain = _plain_leaves(layers)
    if plain is not None:
        return plain, list(_plain_names(len(layers)))
    return _flatten_layers(layers)


def flatten_with_keys_dynamic_cache(cache: Any) -> tuple[list[tuple[Any, Any]], list[str]]:
    """Take a ``DynamicCache`` apart, each leaf with its key: ``[key_0]``, ``[value_W8_1]``."""
    return _with_keys(*flatten_dynamic_cache(cache))


def unflatten_dynamic_cache(values: Iterable[Any], context: list[str], output_type: type | None = None) -> Any:
    """Put a ``DynamicCache`` together around the given leaves, without copying them.

    Args:
        values: the leaves, as :func:`flatten_dynamic_cache` returned them, or placeholders for them.
        context: their names, as :func:`flatten_dynamic_cache` returned them.
        output_type: not used; there because users of this format pass it.

    Returns:
        A cache that goes on generating as the original would.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    values = values if isinstance(values, list) else list(values)
    if context == list(_plain_names(len(context) // 2)):
        if len(values) != len(context):
            raise _wrong_count(context, values, len(context))
        cache = _new_cache(DynamicCache, _plain_layers(values))
    else:
        cache = _new_cache(DynamicCache, _unflatten_layers(values, context))
    only_full = all(type(layer) is DynamicLayer for layer in cache.layers)
    # A cache of full layers only may have been made to grow by one layer per layer of the model; one made from a
    # configuration has all of them and never asks. Both are the same kind of cache to a program.
    cache.layer_class_to_replicate = DynamicLayer if only_full else None
    return cache


def flatten_static_cache(cache: Any) -> tuple[list[Any], list[str]]:
    """Take a ``StaticCache`` apart.

    Args:
        cache: a ``transformers.StaticCache`` whose layers are ``StaticLayer`` or ``StaticSlidingWindowLayer``.

    Returns:
        The cache's own tensors, of shape (batch, heads, maximal length, head size), its counters, and their names.

    Raises:
        CacheStructureError: when a layer is half-initialised.
        UnsupportedLayerError: when a layer is of another class.
    """
    return _flatten_layers(_layers_of(cache))


def flatten_with_keys_static_cache(cache: Any) -> tuple[list[tuple[Any, Any]], list[str]]:
    """Take a ``StaticCache`` apart, each leaf with its key: ``[key_S16_0]``, ``[position_S16_0]``."""
    return _with_keys(*flatten_static_cache(cache))


def unflatten_static_cache(values: Iterable[Any], context: list[str], output_type: type | None = None) -> Any:
    """Put a ``StaticCache`` together around the given leaves, without copying them."""
    from transformers.cache_utils import StaticCache

    cache = _new_cache(StaticCache, _unflatten_layers(list(values), context))
    cache.layer_class_to_replicate = None
    return cache


def flatten_encoder_decoder_cache(cache: Any) -> tuple[list[Any], list[str]]:
    """Take an ``EncoderDecoderCache`` apart into its two caches.

    ``is_updated`` says of each layer whether the encoder's keys are there. Where that is not what the layers themselves
    show, it is stored as a third name, ``is_updated_<0 or 1 for each layer>``.

    Args:
        cache: a ``transformers.EncoderDecoderCache``.

    Returns:
        The self-attention and the cross-attention cache, and the names ``self_attention_cache``,
        ``cross_attention_cache``.
    """
    names = ["self_attention_cache", "cross_attention_cache"]
    cross = cache.cross_attention_cache
    if cache.is_updated != _shown_updates(cross):
        flags = [cache.is_updated.get(index) for index in range(max(cache.is_updated, default=-1) + 1)]
        names.append("is_updated_" + "".join("-" if flag is None else str(int(flag)) for flag in flags))
    return [cache.self_attention_cache, cross], names


def flatten_with_keys_encoder_decoder_cache(cache: Any) -> tuple[list[tuple[Any, Any]], list[str]]:
    """Take an ``EncoderDecoderCache`` apart into its two caches, each with its key."""
    caches, names = flatten_encoder_decoder_cache(cache)
    return [(MappingKey(name), child) for name, child in zip(names, caches, strict=False)], names


def unflatten_encoder_decoder_cache(values: Iterable[Any], context: list[str], output_type: type | None = None) -> Any:
    """Put an ``EncoderDecoderCache`` together around its two caches."""
    from transformers.cache_utils import EncoderDecoderCache

    cache = EncoderDecoderCache.__new__(EncoderDecoderCache)
    cache.self_attention_cache, cache.cross_attention_cache = values
    if len(context) > 2:
        flags = context[2].removeprefix("is_updated_")
        cache.is_updated = {index: flag == "1" for index, flag in enumerate(flags) if flag != "-"}
    else:
        cache.is_updated = _shown_updates(cache.cross_attention_cache)
    return cache


def axes_of_leaf(name: str) -> dict[int, str]:
    """Tell which axes of a cache's leaf vary between calls.

    >>> axes_of_leaf("key_W8_1"), axes_of_leaf("value_S16_0"), axes_of_leaf("length")
    ({0: 'batch', 2: 'length'}, {0: 'batch'}, {})
    """
    part, _, rest = name.partition("_")
    if part not in ("key", "value"):
        return {}
    return {0: "batch"} if rest[:1] in ("S", "X") else {0: "batch", 2: "length"}


def label_of_leaf(name: str, below: str) -> str:
    """Name a cache's leaf as the ONNX tools for generation do.

    >>> label_of_leaf("key_W8_1", ""), label_of_leaf("value_0", ""), label_of_leaf("length", "")
    ('1.key', '0.value', 'length')
    """
    if name == _LENGTH:
        return name
    part, index = name.split("_")[0], name.rsplit("_", 1)[1]
    return f"{index}.{part}"


def label_of_cache(name: str, below: str) -> str:
    """Name a leaf of an ``EncoderDecoderCache`` as the ONNX tools for generation do.

    >>> label_of_cache("self_attention_cache", "1.key"), label_of_cache("cross_attention_cache", "1.key")
    ('1.decoder.key', '1.encoder.key')
    """
    side = "decoder" if name == "self_attention_cache" else "encoder"
    index, dot, part = below.partition(".")
    return f"{index}.{side}.{part}" if dot else f"{side}.{below}"


# -- the parts -------------------------------------------------------------------------------------------------------


@functools.cache
def _plain_names(count: int) -> tuple[str, ...]:
    return tuple(f"{part}_{index}" for index in range(count) for part in ("key", "value"))


def _plain_leaves(layers: list[Any]) -> list[Any] | None:
    """The leaves of a cache of filled ``DynamicLayer`` only, ``None`` for any other: the common case, kept quick."""
    leaves: list[Any] = []
    add = leaves.append
    classes = set(map(type, layers))
    if len(classes) > 1 or (classes and classes.pop() is not kind_of_code("D")[0].cls):
        return None
    for layer in layers:
        held = layer.__dict__
        keys, values = held["keys"], held["values"]
        if (keys is None or values is None or not held.get("is_initialized", True)) and PLACEHOLDERS not in held:
            return None
        add(keys)
        add(values)
    return leaves


def _plain_layers(leaves: list[Any]) -> list[Any]:
    kind, _ = kind_of_code("D")
    new, cls, flag = object.__new__, kind.cls, {"is_initialized": True} if kind.has_flag else {}
    layers = []
    pairs = iter(leaves)
    for keys, values in zip(pairs, pairs, strict=True):
        layer: Any = new(cls)
        if isinstance(keys, torch.Tensor):
            layer.__dict__ = {"keys": keys, "values": values, **flag, "dtype": keys.dtype, "device": keys.device}
        else:
            layer.__dict__ = {"keys": keys, "values": values, **flag}
        if keys is None or values is None:
            layer.__dict__[PLACEHOLDERS] = True
        layers.append(layer)
    return layers


def _flatten_layers(layers: list[Any]) -> tuple[list[Any], list[str]]:
    values: list[Any] = []
    names: list[str] = []
    full: Any = _UNSET  # keys of the first filled DynamicLayer, which hold every token
    first = ("", "")  # the first filled sliding layer
    seen: Any = _UNSET  # what the sliding layers counted
    for index, layer in enumerate(layers):
        try:
            kind = kind_of(type(layer))
        except UnsupportedLayerError as error:
            raise UnsupportedLayerError(f"layers[{index}]: {error}") from None
        code = kind.code(layer)
        if not kind.is_filled(layer, index):
            names.append(f"none_{code}_{index}")
            continue
        values += (layer.keys, layer.values)
        names += (f"key_{code}_{index}", f"value_{code}_{index}")
        position = kind.position(layer)
        if kind.has_position:
            values.append(position)
            names.append(f"position_{code}_{index}")
        if kind.letter == "D" and full is _UNSET:
            full = layer.keys
        elif kind.is_sliding:
            kind.remember(layer)
            length = kind.length(layer)
            if seen is _UNSET:
                seen, first = length, (f"layers[{index}]", code)
            else:
                _agreed(seen, length, f"layers[{index}]", code)
    if seen is not _UNSET:
        if full is _UNSET:
            values.append(seen)
            names.append(_LENGTH)
        elif isinstance(full, torch.Tensor):
            _agreed(_key_count(full), seen, *first)
    return values, names


def _unflatten_layers(values: list[Any], names: list[str]) -> list[Any]:
    parsed = [name.rsplit("_", 2) for name in names if name != _LENGTH]
    expected = len(names) - sum(part == "none" for part, *_ in parsed)
    if len(values) != expected:
        raise SpecMismatchError(
            f"A cache with the leaves {names} was given {len(values)} values instead of {expected}."
        )
    length = values[-1] if names and names[-1] == _LENGTH else _length_of_full_layers(values, names)
    leaves = iter(values)
    positions = {index for part, _, index in parsed if part == "position"}
    layers = []
    for part, code, index in parsed:
        if part in ("key", "none"):
            kind, parameter = kind_of_code(code)
            count = length if part == "key" else 0
            filled = leaves if part == "key" else None
            layers.append(kind.rebuild(parameter, filled, count, index in positions))
    return layers


def _length_of_full_layers(values: list[Any], names: list[str]) -> Any:
    """The number of tokens that the first full layer holds, 0 when there is none (then nothing slides)."""
    leaves = iter(values)
    for name in names:
        if name.startswith("none_"):
            continue
        leaf = next(leaves)
        if name.startswith("key_D_"):
            return _key_count(leaf) if isinstance(leaf, torch.Tensor) else 0
    return 0


def _key_count(keys: torch.Tensor) -> Any:
    # transformers fills a layer with a one-dimensional empty tensor before its first update
    return keys.shape[-2] if keys.dim() > 1 else 0


def _agreed(expected: Any, found: Any, place: str, code: str) -> Any:
    """All layers of a cache saw the same tokens: one count serves them all."""
    # in a trace both are symbols; comparing them would add a guard to the program
    if type(expected) is int and type(found) is int and expected != found:
        raise CacheStructureError(
            f"The layers of this cache have seen different numbers of tokens: {expected} and, in {place} ({code}), "
            f"{found}. Such a cache cannot go on generating; fill every layer with the same tokens."
        )
    return expected


def _wrong_count(names: list[str], values: list[Any], expected: int) -> SpecMismatchError:
    return SpecMismatchError(f"A cache with the leaves {names} was given {len(values)} values instead of {expected}.")


def _layers_of(cache: Any) -> list[Any]:
    if cache.offloading:
        raise CacheStructureError(
            f"This {type(cache).__qualname__} moves its layers between devices (offloading=True), which a rebuilt cache "
            "would not go on to do. Pass one made with offloading=False."
        )
    return cache.layers  # type: ignore[no-any-return]


def _with_keys(values: list[Any], names: list[str]) -> tuple[list[tuple[Any, Any]], list[str]]:
    leaf_names = (name for name in names if not name.startswith("none_"))
    return [(MappingKey(name), value) for name, value in zip(leaf_names, values, strict=True)], names


def _new_cache(cls: Any, layers: list[Any]) -> Any:
    cache = cls.__new__(cls)
    cache.layers, cache.offloading = layers, False
    return cache


def _shown_updates(cross: Any) -> dict[int, bool]:
    """``is_updated`` as the layers themselves show it; empty for placeholders."""
    layers = getattr(cross, "layers", ())
    return {index: kind_of(type(layer)).is_filled(layer, index) for index, layer in enumerate(layers)}
