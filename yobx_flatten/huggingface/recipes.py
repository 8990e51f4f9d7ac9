"""List the classes that ``patch_transformers=True`` registers, and the earlier registrations that it replaces."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Container, Iterable
from types import ModuleType
from typing import Any

from ..core.private_names.of_torch import pytree
from ..registry.recipe.aliases import TransformersCache
from ..registry.recipe.attributes import builtin_base
from ..registry.recipe.contract import Flatten, Recipe, Unflatten
from .caches import functions as caches
from .caches.functions import axes_of_leaf, label_of_leaf, layers_of, new_cache, with_keys
from .caches.known_state import read_known_state, read_template
from .caches.layers import PLACEHOLDERS
from .caches.layouts import flatten_layers, is_leaf_name, rebuild_by_attributes, rebuild_plan, unflatten_layers
from .caches.state import StateBuilder, follow_state, leaf_paths
from .outputs import REMEDY, ModelClasses, classes_of, output_recipes, output_recipes_of_module, subclasses_of

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


# -- subclasses of Cache ---------------------------------------------------------------------------------------------


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


# -- caches that are not a Cache -------------------------------------------------------------------------------------


def _plain_functions(cls: type) -> tuple[Flatten, Unflatten]:
    new: Any = builtin_base(cls).__new__  # `KVSharingDict` is a dict

    def flatten(obj: object) -> tuple[list[Any], list[str]]:
        template, paths, leaves = _read_object(obj, {PLACEHOLDERS})
        return leaves, [_OWN + template, *paths]

    def unflatten(values: Iterable[Any], context: list[str], output_type: type | None = None) -> TransformersCache:
        return rebuild_by_attributes(cls, _builder_of(context[0]), iter(values), 0, new)

    return flatten, unflatten


# -- the classes -----------------------------------------------------------------------------------------


def _is_plain_cache(cls: type) -> bool:
    if not cls.__name__.endswith("Cache") or inspect.isabstract(cls):
        return False
    bases = {base.__name__ for base in cls.__mro__}
    return not bases & {"Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "Module", "PreTrainedConfig"}


_PLAIN_CACHES = ModelClasses(_is_plain_cache)  # classes of imported models that do not inherit `Cache`


class _ByClass(dict[str, str]):
    """A dict with full class names as keys, which can also be looked up by class; so it imports no class."""

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
    """Return the flatten functions of cache and output classes; ``None`` if transformers' registration is correct."""
    import transformers.cache_utils as cache_utils

    recipes: dict[type, Recipe | None] = {}
    for cls, suffix in (
        (cache_utils.DynamicCache, "dynamic_cache"),
        (cache_utils.StaticCache, "static_cache"),
        (cache_utils.EncoderDecoderCache, "encoder_decoder_cache"),
    ):
        flatten, unflatten = getattr(caches, f"flatten_{suffix}"), getattr(caches, f"unflatten_{suffix}")
        keyed = getattr(caches, f"flatten_with_keys_{suffix}")
        label = caches.label_of_cache if suffix == "encoder_decoder_cache" else label_of_leaf
        name = f"yobx_flatten.transformers:{cls.__name__}"
        recipes[cls] = Recipe(cls, flatten, unflatten, keyed, name, REMEDY, axes=axes_of_leaf, label=label)
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
