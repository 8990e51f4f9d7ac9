"""List the classes that ``patch_transformers=True`` registers, and the registrations that it suspends."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..recipe.contract import Recipe
from .caches import functions as caches
from .caches.other_caches import cache_recipes, cache_recipes_of_module
from .outputs import output_recipes, output_recipes_of_module

_REMEDY = "with register_flattening_functions(patch_transformers=True): ..."


class _ByClass(dict[str, str]):
    """A dict by full class name that also answers for the classes themselves, without importing them."""

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
            "transformers' executorch registration rebuilds caches through `update`, which copies every tensor, and "
            f"forgets how many tokens a sliding layer has seen; {_COUNTED}"
        ),
        "transformers.cache_utils.StaticCache": _COUNTED,
        "transformers.cache_utils.EncoderDecoderCache": f"several forget `is_updated`; {_COUNTED}",
        "transformers.modeling_outputs.BaseModelOutput": "transformers before 5.17 registers it without keys",
    }
)
"""Registrations of other libraries that are known not to work for exports, by class. ``register_flattening_functions``
replaces them by ours, and restores them on exit."""


def transformers_recipes() -> dict[type, Recipe | None]:
    """Recipes of the known classes; ``None`` where transformers' own registration is right and stays."""
    import transformers.cache_utils as cache_utils

    recipes: dict[type, Recipe | None] = {
        cache_utils.DynamicCache: _recipe(cache_utils.DynamicCache, "dynamic_cache", caches),
        cache_utils.StaticCache: _recipe(cache_utils.StaticCache, "static_cache", caches),
        cache_utils.EncoderDecoderCache: _recipe(cache_utils.EncoderDecoderCache, "encoder_decoder_cache", caches),
    }
    recipes.update(output_recipes(_REMEDY))
    recipes.update({recipe.cls: recipe for recipe in cache_recipes(set(recipes), _REMEDY)})
    return recipes


def transformers_recipes_of_module(module: ModuleType) -> list[Recipe]:
    """Recipes of the caches and outputs that a model's module defines, for modules imported inside a block."""
    return cache_recipes_of_module(module, _REMEDY) + output_recipes_of_module(module, _REMEDY)


def _recipe(cls: type, suffix: str, module: ModuleType) -> Recipe:
    return Recipe(
        cls,
        getattr(module, f"flatten_{suffix}"),
        getattr(module, f"unflatten_{suffix}"),
        getattr(module, f"flatten_with_keys_{suffix}"),
        f"yobx_flatten.transformers:{cls.__name__}",
        _REMEDY,
        axes=getattr(module, "axes_of_leaf", None),
        label={"encoder_decoder_cache": caches.label_of_cache}.get(suffix, getattr(module, "label_of_leaf", None)),
    )
