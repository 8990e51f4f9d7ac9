"""Flatten ``DynamicCache``, ``StaticCache`` and ``EncoderDecoderCache`` as pytree nodes.

The static part of a cache is the list of its leaves' names: ``key_0, value_0, key_1, ...`` if all layers are
``DynamicLayer``, else with a code for the layer class (:mod:`.layers`): ``key_D_0, key_W8_1, ...``. The name
``none_W8_1`` stands for layer 1 with a sliding window of 8, before it has keys. The number of tokens that a
cache has seen is not stored if a layer has the keys of all tokens. If a cache has sliding layers, but no layer with the
keys of all tokens, the number of tokens seen is another leaf, the 0-d tensor ``length`` (:mod:`.layouts`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...core.private_names.of_torch import MappingKey
from ...errors import CacheStructureError, UnsupportedLayerError, describe_class
from ...registry.recipe.aliases import CacheLayer, TransformersCache
from .layers import kind_of, letter_of
from .layouts import flatten_layers, is_leaf_name, rebuild_plan, unflatten_layers


def flatten_dynamic_cache(cache: TransformersCache) -> tuple[list[Any], list[str]]:
    """Flatten a ``DynamicCache``.

    Args:
        cache: a ``transformers.DynamicCache``, with layers of any class.

    Returns:
        The cache's tensors, not copied, each of shape (batch, heads, length, head size), and the names of the tensors.

    Raises:
        CacheStructureError: when a layer is partly initialised, or a sliding layer has seen another number of tokens
            than a full layer.
        StaticDataError: when an attribute of a layer is neither a tensor nor data that a program can store.
    """
    return flatten_layers(layers_of(cache), plain=True)


def flatten_with_keys_dynamic_cache(cache: TransformersCache) -> tuple[list[tuple[Any, Any]], list[str]]:
    """Flatten a ``DynamicCache`` into leaves with pytree keys, such as ``[key_0]`` and ``[value_W8_1]``.

    Args:
        cache: see :func:`flatten_dynamic_cache`.

    Returns:
        Pairs of a pytree key and a leaf, and the names of the leaves.

    Raises:
        CacheStructureError: see :func:`flatten_dynamic_cache`.
        StaticDataError: see :func:`flatten_dynamic_cache`.
    """
    return with_keys(*flatten_dynamic_cache(cache))


def unflatten_dynamic_cache(
    values: Iterable[Any], context: list[str], output_type: type | None = None
) -> TransformersCache:
    """Make a ``DynamicCache`` that contains the given leaves, without copying them.

    Args:
        values: the leaves, as :func:`flatten_dynamic_cache` returned them, or placeholders for them.
        context: the names of the leaves, as :func:`flatten_dynamic_cache` returned them.
        output_type: ignored; callers may pass a class as third argument.

    Returns:
        A cache with which generation continues as with the flattened cache.

    Raises:
        SpecMismatchError: when the number of values is not the number of names in ``context``.
        UnsupportedLayerError: when a leaf name has a letter that stands for no layer class.
    """
    from transformers.cache_utils import DynamicCache

    layers, names = _layers(values, context)
    return new_cache(DynamicCache, layers, grows=rebuild_plan(names).full_only)


def flatten_static_cache(cache: TransformersCache) -> tuple[list[Any], list[str]]:
    """Flatten a ``StaticCache``.

    Args:
        cache: a ``transformers.StaticCache``, with layers of any class.

    Returns:
        The cache's tensors, not copied, of shape (batch, heads, capacity, head size), its counters, and all leaf names.

    Raises:
        CacheStructureError: when a layer is only partly initialised.
        StaticDataError: when an attribute of a layer is neither a tensor nor data that a program can store.
    """
    return flatten_layers(layers_of(cache), plain=False)


def flatten_with_keys_static_cache(cache: TransformersCache) -> tuple[list[tuple[Any, Any]], list[str]]:
    """Flatten a ``StaticCache`` into leaves with pytree keys, such as ``[key_S16_0]`` and ``[position_S16_0]``.

    Args:
        cache: see :func:`flatten_static_cache`.

    Returns:
        Pairs of a pytree key and a leaf, and the names of the leaves.

    Raises:
        CacheStructureError: see :func:`flatten_static_cache`.
        StaticDataError: see :func:`flatten_static_cache`.
    """
    return with_keys(*flatten_static_cache(cache))


def unflatten_static_cache(
    values: Iterable[Any], context: list[str], output_type: type | None = None
) -> TransformersCache:
    """Make a ``StaticCache`` that contains the given leaves, without copying them.

    Args:
        values: the leaves, as :func:`flatten_static_cache` returned them, or placeholders for them.
        context: the names of the leaves, as :func:`flatten_static_cache` returned them.
        output_type: ignored; callers may pass a class as third argument.

    Returns:
        A cache with which generation continues as with the flattened cache.

    Raises:
        SpecMismatchError: when the number of values is not the number of names in ``context``.
        UnsupportedLayerError: when a leaf name has a letter that stands for no layer class.
    """
    from transformers.cache_utils import StaticCache

    return new_cache(StaticCache, _layers(values, context)[0], grows=False)


def _layers(values: Iterable[Any], names: list[str]) -> tuple[list[Any], list[str]]:
    """Rebuild cache layers from leaves; sizes that leaf names of the package yobx lack are read from key tensors."""
    values = values if isinstance(values, (list, tuple)) else list(values)
    try:
        return unflatten_layers(values, names), names
    except UnsupportedLayerError:
        sized = with_sizes(values, names)
        if sized == names:
            raise
        return unflatten_layers(values, sized), sized


def flatten_encoder_decoder_cache(cache: TransformersCache) -> tuple[list[Any], list[str]]:
    """Flatten an ``EncoderDecoderCache`` into its two caches.

    ``is_updated`` of a cache states for each layer whether cross-attention keys are present. If ``is_updated``
    disagrees with the layers, a third name stores ``is_updated``: the name ``is_updated_10-`` means true for layer 0,
    false for layer 1, and no entry for layer 2.

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


def flatten_with_keys_encoder_decoder_cache(cache: TransformersCache) -> tuple[list[tuple[Any, Any]], list[str]]:
    """Flatten an ``EncoderDecoderCache`` into its two caches, each with a pytree key.

    Args:
        cache: a ``transformers.EncoderDecoderCache``.

    Returns:
        Pairs of a pytree key and a cache, and the names of the caches.
    """
    caches, names = flatten_encoder_decoder_cache(cache)
    return [(MappingKey(name), child) for name, child in zip(names, caches, strict=False)], names


def unflatten_encoder_decoder_cache(
    values: Iterable[Any], context: list[str], output_type: type | None = None
) -> TransformersCache:
    """Make an ``EncoderDecoderCache`` from its two flattened caches.

    Args:
        values: the self-attention and the cross-attention cache, or placeholders for them.
        context: the names of the two caches, as :func:`flatten_encoder_decoder_cache` returned them.
        output_type: ignored; callers may pass a class as third argument.

    Returns:
        A cache with the same ``is_updated`` as the flattened cache.

    Raises:
        ValueError: when ``values`` does not contain two entries.
    """
    from transformers.cache_utils import EncoderDecoderCache

    cache = EncoderDecoderCache.__new__(EncoderDecoderCache)
    cache.self_attention_cache, cache.cross_attention_cache = values
    if len(context) > 2:
        flags = context[2].removeprefix("is_updated_")
        cache.is_updated = {index: flag == "1" for index, flag in enumerate(flags) if flag != "-"}
    else:
        cache.is_updated = _shown_updates(cache.cross_attention_cache)
    return cache


# path, code, index: `key_W8_1`, `conv_states.0_L_2`, `key_0`
_NAME = re.compile(r"(.+?)(?:_([A-Z][A-Za-z0-9]*))?_(\d+)")

# The axes that vary, by attribute, for leaves with a known meaning.
_AXES: dict[str, dict[int, str]] = {
    "key": {0: "batch", 2: "length"},
    "value": {0: "batch", 2: "length"},
    "_quantized_keys": {0: "batch", 2: "length"},
    "_quantized_values": {0: "batch", 2: "length"},
    "indexer_keys": {0: "batch", 1: "length"},
    "indexer_position_ids": {1: "batch", 2: "length"},
    "conv_states": {0: "batch"},
    "recurrent_states": {0: "batch"},
    "buffer_kv": {0: "batch", 1: "length"},
    "buffer_gate": {0: "batch", 1: "length"},
    "compressed_kv": {0: "batch", 1: "length"},
    "linear_cache": {0: "batch"},
    "rnn_state": {0: "batch"},
    "position": {},
    "length": {},
    "entry_count": {},  # 0-d tensors vary without an axis
}


def axes_of_leaf(name: str) -> dict[int, str] | None:
    """Return the dynamic axes of the cache tensor with a leaf name; ``None`` for an unknown leaf name.

    >>> axes_of_leaf("key_W8_1"), axes_of_leaf("value_S16_0"), axes_of_leaf("length")
    ({0: 'batch', 2: 'length'}, {0: 'batch'}, {})
    """
    found = _NAME.fullmatch(name)
    path, code = (found[1], found[2] or "") if found else (name, "")
    axes = _AXES.get(path.split(".")[0])
    if axes is None:
        return None if "." in path or code else {}
    static = letter_of(code) in {"S", "X", "J", "LS", "LX"}  # tensors have their full length from the start
    return {axis: meaning for axis, meaning in axes.items() if meaning == "batch" or not static}


def label_of_leaf(name: str, below: str) -> str:
    """Return the name that ONNX tools for generation use for a tensor of a KV cache.

    >>> label_of_leaf("key_W8_1", ""), label_of_leaf("value_0", ""), label_of_leaf("length", "")
    ('1.key', '0.value', 'length')
    """
    found = _NAME.fullmatch(name)
    return f"{found[3]}.{found[1]}" if found and (found[2] or found[1] in _AXES) else name


def label_of_cache(name: str, below: str) -> str:
    """Return the name that ONNX tools for generation use for a tensor of an ``EncoderDecoderCache``.

    >>> label_of_cache("self_attention_cache", "1.key"), label_of_cache("cross_attention_cache", "1.key")
    ('1.decoder.key', '1.encoder.key')
    """
    side = "decoder" if name == "self_attention_cache" else "encoder"
    index, dot, part = below.partition(".")
    return f"{index}.{side}.{part}" if dot else f"{side}.{below}"


def layers_of(cache: TransformersCache) -> list[CacheLayer]:
    if not hasattr(cache, "layers"):
        raise CacheStructureError(
            f"Expected a cache with layers, found {describe_class(cache)}. Pass the cache that a model returned, or "
            "make_dynamic_cache(pairs)."
        )
    if getattr(cache, "offloading", False):
        raise CacheStructureError(
            f"This {type(cache).__qualname__} moves its layers between devices (offloading=True), but a rebuilt cache "
            "would not. Pass a cache made with offloading=False."
        )
    return cache.layers  # type: ignore[no-any-return]


def with_keys(values: list[Any], names: list[str]) -> tuple[list[tuple[Any, Any]], list[str]]:
    leaf_names = filter(is_leaf_name, names)
    return [(MappingKey(name), value) for name, value in zip(leaf_names, values, strict=True)], names


def new_cache(cls: Any, layers: list[Any], *, grows: bool) -> TransformersCache:
    # grows: whether the cache adds missing layers. A `DynamicCache` of full layers may be created empty and grow by one
    # layer per model layer; a cache made from a configuration has all layers. A program accepts both.
    from transformers.cache_utils import DynamicLayer

    cache = cls.__new__(cls)
    replicated = DynamicLayer if grows else None
    cache.__dict__ = {"layers": layers, "layer_class_to_replicate": replicated, "offloading": False}
    return cache


def _shown_updates(cross: TransformersCache | None) -> dict[int, bool]:
    """Return a dict like ``is_updated``: for each layer of a cross-attention cache, whether it is filled."""
    found = {}
    for index, layer in enumerate(getattr(cross, "layers", ())):
        kind = kind_of(type(layer))
        found[index] = getattr(layer, "keys", None) is not None if kind is None else kind.is_filled(layer, index)
    return found


# leaf names, without a size, of sliding layers and of layers that have their full length from the start
_WITHOUT = re.compile(r"(.+)_([WSX])_(\d+)")


def with_sizes(values: Sequence[Any], names: list[str]) -> list[str]:
    """Add the size of each layer, read from its keys, to leaf names that the package yobx wrote without sizes.

    >>> with_sizes([torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4)], ["key_W_0", "value_W_0"])
    ['key_W5_0', 'value_W5_0']
    """
    # names with a size, and names of keys that are not tensors, are unchanged
    found, sizes = [_WITHOUT.fullmatch(name) for name in names], dict[str, int]()
    for match, value in zip(found, values, strict=False):
        if match is not None and match[1] == "key" and isinstance(value, torch.Tensor):
            sizes[match[3]] = value.shape[2]
    return [
        f"{match[1]}_{match[2]}{sizes[match[3]]}_{match[3]}" if match is not None and match[3] in sizes else name
        for match, name in zip(found, names, strict=True)
    ]
