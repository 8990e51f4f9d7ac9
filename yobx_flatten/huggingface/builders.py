"""Build transformers KV caches from given keys and values, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from ..errors import CacheStructureError, describe_class
from ..registry.recipe.aliases import CacheLayer, TransformersCache
from .caches.layers import LETTERS, keeps_dtype

Pairs: TypeAlias = Sequence[torch.Tensor] | Sequence[tuple[torch.Tensor, torch.Tensor]]
Layers: TypeAlias = str | type | Sequence[str | type] | None
Options: TypeAlias = dict[str, Any] | Sequence[dict[str, Any]] | None


def make_dynamic_cache(
    key_value_pairs: Pairs, cls_layers: Layers = None, cls_kwargs: Options = None
) -> TransformersCache:
    """Make a ``DynamicCache`` from the given tensors, without copies.

    Args:
        key_value_pairs: one (keys, values) pair per layer, or one flat list of keys and values. The tensors have the
            shape (batch, heads, length, head size), but tensors with two or three axes are also accepted.
        cls_layers: class of the cache layers (or its name), or a list with a class per layer; default ``DynamicLayer``.
        cls_kwargs: constructor arguments of the layers, a dict or a list with a dict per layer, such as
            ``{"sliding_window": 8}``. By default, the sliding window is the length of the keys.

    Returns:
        The cache. The token count of each sliding layer is the number of keys in the first ``DynamicLayer``, or, if the
        cache has no ``DynamicLayer``, the number of keys in the sliding layer itself.

    Raises:
        CacheStructureError: when the arguments do not fit each other.

    >>> import torch
    >>> pairs = [(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))] * 2
    >>> cache = make_dynamic_cache(pairs, ["DynamicLayer", "DynamicSlidingWindowLayer"], [{}, {"sliding_window": 8}])
    >>> [type(layer).__name__ for layer in cache.layers], cache.layers[1].sliding_window
    (['DynamicLayer', 'DynamicSlidingWindowLayer'], 8)
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    pairs = _pairs(key_value_pairs, fewest=2)
    classes = _per_layer(cls_layers if cls_layers is not None else DynamicLayer, len(pairs), "cls_layers")
    options = _per_layer(cls_kwargs or {}, len(pairs), "cls_kwargs")
    layers = [_new_layer(c, o, "DW", keys) for c, o, (keys, _) in zip(classes, options, pairs, strict=True)]
    held = [keys.shape[-2] for layer, (keys, _) in zip(layers, pairs, strict=True) if type(layer) is DynamicLayer]
    for layer, (keys, values) in zip(layers, pairs, strict=True):
        _fill(layer, keys, values)
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = held[0] if held else keys.shape[-2]
    cache = DynamicCache()
    cache.layers = layers
    if len(held) < len(layers):
        cache.layer_class_to_replicate = None
    return cache


def make_static_cache(
    key_value_pairs: Pairs,
    max_cache_len: int | None = None,
    cls_layers: Layers = None,
    cls_kwargs: Options = None,
    *,
    length: int | None = None,
) -> TransformersCache:
    """Make a ``StaticCache``, of fixed capacity, that contains the given keys and values.

    Args:
        key_value_pairs: one (keys, values) pair per layer, or one flat list of keys and values; each tensor of shape
            (batch, heads, length, head size).
        max_cache_len: capacity of a layer in tokens; by default the length of the keys in the first layer. Keys of full
            capacity are not copied; shorter keys are copied into a tensor of zeros.
        cls_layers: class of the cache layers (or its name), or a list with a class per layer; default ``StaticLayer``.
        cls_kwargs: constructor arguments of the layers, a dict or a list with a dict per layer.
        length: number of tokens that the cache has seen; by default the length of the keys in the first layer.

    Returns:
        The cache, in which the next token has the position ``length``.

    Raises:
        CacheStructureError: when the arguments do not fit each other.

    >>> import torch
    >>> cache = make_static_cache([(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))], max_cache_len=8)
    >>> cache.layers[0].keys.shape, int(cache.get_seq_length())
    (torch.Size([1, 2, 8, 4]), 3)
    """
    from transformers.cache_utils import StaticCache, StaticLayer

    pairs = _pairs(key_value_pairs)
    if not pairs:
        raise CacheStructureError(
            "make_static_cache: key_value_pairs is empty; give one (keys, values) pair per layer."
        )
    held = pairs[0][0].shape[-2]
    room, length = max_cache_len or held, held if length is None else length
    classes = _per_layer(cls_layers if cls_layers is not None else StaticLayer, len(pairs), "cls_layers")
    options = _per_layer(cls_kwargs or {}, len(pairs), "cls_kwargs")
    cache = StaticCache.__new__(StaticCache)
    cache.layers, cache.layer_class_to_replicate, cache.offloading = [], None, False
    for (keys, values), cls, option in zip(pairs, classes, options, strict=True):
        layer = _new_layer(cls, {"max_cache_len": room, **option}, "SX")
        layer_room = layer.max_cache_len
        layer.lazy_initialization(*(keys, values)[: layer.lazy_initialization.__code__.co_argcount - 1])
        _fill(layer, _with_room(keys, layer_room), _with_room(values, layer_room))
        if length < 0 or (length > layer_room and not layer.is_sliding):
            raise CacheStructureError(f"length={length}: expected 0 to {layer_room} (max_cache_len).")
        if isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
            layer.cumulative_length = torch.tensor(min(length, layer_room), dtype=torch.int64, device=keys.device)
        elif hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length
        if hasattr(layer, "cumulative_length_int"):
            layer.cumulative_length_int = length
        cache.layers.append(layer)
    return cache


def make_encoder_decoder_cache(
    self_attention_cache: TransformersCache, cross_attention_cache: TransformersCache
) -> TransformersCache:
    """Make an ``EncoderDecoderCache`` of a self-attention cache and a cross-attention cache.

    Args:
        self_attention_cache: cache of the decoder's self-attention keys and values.
        cross_attention_cache: cache of the cross-attention keys and values, computed from the encoder's output.

    Returns:
        The cache, whose ``is_updated`` is true for each layer with cross-attention keys.

    >>> import torch
    >>> keys = torch.ones(1, 2, 3, 4)
    >>> cache = make_encoder_decoder_cache(make_dynamic_cache([keys, keys]), make_dynamic_cache([keys, keys]))
    >>> type(cache).__name__, cache.is_updated
    ('EncoderDecoderCache', {0: True})
    """
    from transformers.cache_utils import EncoderDecoderCache

    return EncoderDecoderCache(self_attention_cache, cross_attention_cache)


def _pairs(pairs: Pairs, fewest: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    given: list[Any] = list(pairs)
    if given and isinstance(given[0], torch.Tensor):
        if len(given) % 2:
            raise CacheStructureError(
                f"key_value_pairs is a flat list of {len(given)} tensors; each layer needs two: keys and values."
            )
        given = list(zip(given[::2], given[1::2], strict=True))
    for index, pair in enumerate(given):
        if len(pair) != 2 or not all(isinstance(t, torch.Tensor) and fewest <= t.dim() <= 4 for t in pair):
            raise CacheStructureError(
                f"key_value_pairs[{index}] must be a pair of tensors of shape (batch, heads, length, head size), found "
                f"{[tuple(t.shape) if isinstance(t, torch.Tensor) else describe_class(t) for t in pair]}."
            )
    return given


def _per_layer(given: str | type | dict[str, Any] | Sequence[Any], count: int, name: str) -> list[Any]:
    if isinstance(given, (str, type, dict)):
        return [given] * count
    entries = list(given)
    if len(entries) != count:
        raise CacheStructureError(
            f"{name} has {len(entries)} entries for {count} layers; give one per layer, or one for all."
        )
    return entries


def _new_layer(cls: str | type, options: dict[str, Any], letters: str, keys: torch.Tensor | None = None) -> CacheLayer:
    import transformers.cache_utils as cache_utils

    allowed = [name for name, letter in LETTERS.items() if letter in letters and hasattr(cache_utils, name)]
    if isinstance(cls, str) and cls not in allowed:
        raise CacheStructureError(f"cls_layers: {cls!r} is not one of {allowed}.")
    chosen: type = getattr(cache_utils, cls) if isinstance(cls, str) else cls
    if chosen.__name__ not in allowed:
        raise CacheStructureError(f"cls_layers: {describe_class(chosen)} is not one of {allowed}.")
    if LETTERS[chosen.__name__] == "W" and keys is not None and keys.shape[-2] > 0:
        options = {"sliding_window": keys.shape[-2], **options}
    try:
        return chosen(**options)
    except TypeError as error:
        raise CacheStructureError(
            f"cls_kwargs: {chosen.__name__}(**{options}) fails: {error}. A sliding layer takes {{'sliding_window': 8}}."
        ) from None


def _fill(layer: CacheLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
    layer.keys, layer.values, layer.device = keys, values, keys.device
    if keeps_dtype(layer.__class__):
        layer.dtype = keys.dtype
    if "is_initialized" in vars(layer):  # transformers >= 4.57
        layer.is_initialized = True


def _with_room(tensor: torch.Tensor, room: int) -> torch.Tensor:
    if tensor.shape[-2] == room:
        return tensor
    if tensor.shape[-2] > room:
        raise CacheStructureError(
            f"make_static_cache: the keys hold {tensor.shape[-2]} tokens, but the layer has room for {room}. Pass "
            "fewer tokens, or a larger max_cache_len (for a sliding layer, also a larger sliding window)."
        )
    padded = tensor.new_zeros((*tensor.shape[:-2], room, tensor.shape[-1]))
    padded[..., : tensor.shape[-2], :] = tensor
    return padded
