"""Flatten transformers caches as pytree nodes, and list the classes that ``patch_transformers=True`` registers.

The static part of a cache is the list of its leaves' names: ``key_0, value_0, key_1, ...`` if all layers are
``DynamicLayer``, else with a code for the layer class (:mod:`.caches.layers`): ``key_D_0, key_W8_1, ...``. The name
``none_W8_1`` stands for layer 1, with a sliding window of 8, while the layer has no keys. The number of tokens that a
cache has seen is not stored if a layer has the keys of all tokens. If a cache has sliding layers, but no layer with the
keys of all tokens, the leaf ``length``, a 0-d tensor, stores the number of tokens seen.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Container, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch

from ..core.private_names.of_torch import MappingKey, pytree
from ..errors import CacheStructureError, UnsupportedLayerError, describe_class
from ..registry.recipe.aliases import CacheLayer, TransformersCache
from ..registry.recipe.attributes import builtin_base
from ..registry.recipe.contract import Flatten, Recipe, Unflatten
from .caches.known_state import read_known_state, read_template
from .caches.layers import PLACEHOLDERS, kind_of, letter_of
from .caches.layouts import flatten_layers, is_leaf_name, rebuild_by_attributes, rebuild_plan, unflatten_layers
from .caches.state import StateBuilder, follow_state, leaf_paths
from .outputs import REMEDY, ModelClasses, classes_of, output_recipes, output_recipes_of_module, subclasses_of


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
    """Rebuild cache layers from leaves and leaf names, also from leaf names that the package yobx wrote."""
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

    The dict ``is_updated`` of a cache states by layer index whether a layer has cross-attention keys. If the dict does
    not agree with the layers, a third name stores the dict. The name ``is_updated_10-`` means true for layer 0, false
    for layer 1, and no entry for layer 2.

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
    """Return the dynamic axes of the cache tensor with the given leaf name; ``None`` for an unknown name.

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
    """Return whether each layer of a cross-attention cache is filled, by layer index."""
    found = {}
    for index, layer in enumerate(getattr(cross, "layers", ())):
        kind = kind_of(type(layer))
        found[index] = getattr(layer, "keys", None) is not None if kind is None else kind.is_filled(layer, index)
    return found


# leaf names, without a size, of sliding layers and of layers that have their full length from the start
_WITHOUT = re.compile(r"(.+)_([WSX])_(\d+)")


def with_sizes(values: Sequence[Any], names: list[str]) -> list[str]:
    """Add sizes in tokens, such as the 5 of ``key_W5_0``, to leaf names that the package yobx wrote without sizes.

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


# A subclass of `Cache` is flattened like its parent; its additional attributes follow an entry `cache=...` that
# describes how to rebuild them. A cache class that does not derive from `Cache` (`xLSTMCache`, padding caches of audio
# codecs) is flattened by its attributes.


# Attributes of every cache; others belong to the subclass.
_STANDARD = {"layers", "layer_class_to_replicate", "offloading", "only_non_sliding", "prefetch_stream", PLACEHOLDERS}
_OWN = "cache="

_RECIPES: dict[type, Recipe] = {}


def _recipe_of_cache(cls: type) -> Recipe | None:
    """Return the flatten functions of a cache class; ``None`` for a class that its author registered with torch."""
    theirs = cls.__module__.split(".")[0] == "transformers"
    # read each once, the node first: other threads write the recipe before the node, and remove the node
    node = pytree.SUPPORTED_NODES.get(cls)
    recipe = _RECIPES.get(cls)
    if not theirs and node is not None and (recipe is None or node.flatten_fn is not recipe.flatten):
        return None
    if recipe is None:
        from transformers.cache_utils import Cache

        flatten, unflatten = (_cache_functions if issubclass(cls, Cache) else _plain_functions)(cls)
        prefix = "yobx_flatten.transformers:" if theirs else "yobx_flatten:"
        short = cls.__name__ if cls.__module__ == "transformers.cache_utils" else f"{cls.__module__}.{cls.__qualname__}"
        functions = flatten, unflatten, lambda cache: with_keys(*flatten(cache))
        recipe = Recipe(cls, *functions, prefix + short, REMEDY, axes=axes_of_leaf, label=label_of_leaf)
        recipe = _RECIPES.setdefault(cls, recipe)  # one for all threads
    return recipe


def _cache_functions(cls: type) -> tuple[Flatten, Unflatten]:
    from transformers.cache_utils import DynamicCache

    plain = issubclass(cls, DynamicCache)

    def flatten(cache: TransformersCache) -> tuple[list[Any], list[str]]:
        values, names = flatten_layers(layers_of(cache), plain=plain)
        if not vars(cache).keys() <= _STANDARD:
            template, paths, leaves = _read_object(cache, _STANDARD)
            values = [*values, *leaves]
            names = [*names, _OWN + template, *paths]
        return values, names

    def unflatten(values: Iterable[Any], context: list[str], output_type: type | None = None) -> TransformersCache:
        leaves = list(values)
        split = next((index for index, name in enumerate(context) if name.startswith(_OWN)), len(context))
        names = context[:split]
        count = sum(map(is_leaf_name, names))
        layers = unflatten_layers(leaves[:count], names)
        cache = new_cache(cls, layers, grows=plain and rebuild_plan(names).full_only)
        if split < len(context):
            builder = _builder_of(context[split])
            held, _, real = builder.build(iter(leaves[count:]), 0)
            cache.__dict__.update(held)
            if not real:
                cache.__dict__[PLACEHOLDERS] = builder.template
        return cache

    return flatten, unflatten


def _read_object(obj: object, without: Container[str]) -> tuple[str, list[str], list[Any]]:
    held = vars(obj)
    own = {name: value for name, value in held.items() if name not in without}
    if PLACEHOLDERS in held:
        template = held[PLACEHOLDERS]
        return json.dumps(template), leaf_paths(template), follow_state(template, own)
    state, leaves = read_known_state((type(obj),), own)
    return state.text, state.paths, leaves


@functools.lru_cache(maxsize=1024)
def _builder_of(name: str) -> StateBuilder:
    return StateBuilder(read_template(name.removeprefix(_OWN)))


def _plain_functions(cls: type) -> tuple[Flatten, Unflatten]:
    new: Any = builtin_base(cls).__new__  # `KVSharingDict` is a dict

    def flatten(obj: object) -> tuple[list[Any], list[str]]:
        template, paths, leaves = _read_object(obj, {PLACEHOLDERS})
        return leaves, [_OWN + template, *paths]

    def unflatten(values: Iterable[Any], context: list[str], output_type: type | None = None) -> TransformersCache:
        return rebuild_by_attributes(cls, _builder_of(context[0]), iter(values), 0, new)

    return flatten, unflatten


def _is_plain_cache(cls: type) -> bool:
    if not cls.__name__.endswith("Cache") or inspect.isabstract(cls):
        return False
    bases = {base.__name__ for base in cls.__mro__}
    return not bases & {"Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "Module", "PreTrainedConfig"}


_PLAIN_CACHES = ModelClasses(_is_plain_cache)  # classes of imported models that do not inherit `Cache`


class _ByClass(dict[str, str]):  # names, because classes would have to be imported
    """A dict whose keys are full names of classes. A lookup by a class finds the entry with the name of the class."""

    def __contains__(self, key: object) -> bool:
        return isinstance(key, (str, type)) and super().__contains__(_full_name(key))

    def __getitem__(self, key: str | type) -> str:
        return super().__getitem__(_full_name(key))

    def get(self, key: str | type, default: Any = None) -> Any:
        return super().get(_full_name(key), default)


def _full_name(key: str | type) -> str:
    return f"{key.__module__}.{key.__qualname__}" if isinstance(key, type) else key


_COUNTED = (
    "transformers' exporters store the number of tokens seen as static data, so that a program refuses other lengths"
)

WRONG_REGISTRATIONS = _ByClass(
    {
        "transformers.cache_utils.DynamicCache": (
            "transformers' executorch registration rebuilds caches through `update`, which copies every tensor and "
            "loses the number of tokens that a sliding layer has seen; " + _COUNTED
        ),
        "transformers.cache_utils.StaticCache": _COUNTED,
        "transformers.cache_utils.EncoderDecoderCache": f"several lose `is_updated`; {_COUNTED}",
        "transformers.modeling_outputs.BaseModelOutput": "transformers before 5.17 registers it without keys",
    }
)
"""By class: registrations of other libraries with which an export is known to fail. ``register_flattening_functions``
replaces these registrations, and restores them on exit."""


def transformers_recipes() -> dict[type, Recipe | None]:
    """Return the flatten functions of each cache and output class; ``None`` if the class needs no new registration."""
    import transformers.cache_utils as cache_utils

    of_dynamic = flatten_dynamic_cache, unflatten_dynamic_cache, flatten_with_keys_dynamic_cache
    of_static = flatten_static_cache, unflatten_static_cache, flatten_with_keys_static_cache
    of_two = flatten_encoder_decoder_cache, unflatten_encoder_decoder_cache, flatten_with_keys_encoder_decoder_cache
    recipes: dict[type, Recipe | None] = {}
    for cls, functions, label in (
        (cache_utils.DynamicCache, of_dynamic, label_of_leaf),
        (cache_utils.StaticCache, of_static, label_of_leaf),
        (cache_utils.EncoderDecoderCache, of_two, label_of_cache),
    ):
        name = f"yobx_flatten.transformers:{cls.__name__}"
        recipes[cls] = Recipe(cls, *functions, name, REMEDY, axes=axes_of_leaf, label=label)
    recipes.update(output_recipes())
    classes = dict.fromkeys(subclasses_of(cache_utils.Cache))
    classes.update(dict.fromkeys(_PLAIN_CACHES()))
    if hasattr(cache_utils, "KVSharingDict"):
        classes[cache_utils.KVSharingDict] = None
    of_caches = [_recipe_of_cache(cls) for cls in classes if cls not in recipes]
    recipes.update({recipe.cls: recipe for recipe in of_caches if recipe is not None})
    return recipes


def transformers_recipes_of_module(module: ModuleType) -> list[Recipe]:
    from transformers.cache_utils import Cache

    classes = [cls for cls in classes_of(module) if issubclass(cls, Cache) or _is_plain_cache(cls)]
    of_caches = [recipe for recipe in map(_recipe_of_cache, classes) if recipe is not None]
    return of_caches + output_recipes_of_module(module)
