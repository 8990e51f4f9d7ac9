"""The classes that ``patch_transformers=True`` knows, and whose registrations by others step back meanwhile."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch.utils._pytree as pytree

from ..recipe import Recipe
from . import caches, outputs
from .other_caches import cache_recipes, cache_recipes_of_module

__all__ = ["WRONG_REGISTRATIONS", "transformers_recipes", "transformers_recipes_of_module"]

_REMEDY = "with register_flattening_functions(patch_transformers=True): ..."

WRONG_REGISTRATIONS: dict[str, str] = {
    "transformers.cache_utils.DynamicCache": (
        "transformers' executorch registration rebuilds caches through `update` (which copies every tensor), forgets "
        "how many tokens a sliding layer has seen, and shifts layers that hold nothing yet; transformers' exporters "
        "store "
        "that number, the dtype and the device as static data, so that a program refuses every other length"
    ),
    "transformers.cache_utils.StaticCache": "transformers' exporters store the number of tokens seen as static data",
    "transformers.cache_utils.EncoderDecoderCache": (
        "transformers' exporters store the number of tokens seen as static data; others forget `is_updated`"
    ),
    "transformers.modeling_outputs.BaseModelOutput": "transformers 4.56 registers it without keys; later versions with",
}
"""Registrations that others make and that are known not to work for exports, by class. Inside the block ours are in
force instead; afterwards theirs again."""


def transformers_recipes() -> dict[type, Recipe | None]:
    """Recipes of the classes we know; ``None`` where transformers' own registration is right and stays in force."""
    import transformers.cache_utils as cache_utils

    recipes: dict[type, Recipe | None] = {
        cache_utils.DynamicCache: _recipe(cache_utils.DynamicCache, "dynamic_cache", caches),
        cache_utils.StaticCache: _recipe(cache_utils.StaticCache, "static_cache", caches),
        cache_utils.EncoderDecoderCache: _recipe(cache_utils.EncoderDecoderCache, "encoder_decoder_cache", caches),
    }
    # not imported, no instance of it: nothing to register, and importing it would register 70 classes for good
    modeling_outputs = sys.modules.get("transformers.modeling_outputs")
    if modeling_outputs is not None:
        cls = modeling_outputs.BaseModelOutput
        theirs = pytree.SUPPORTED_NODES.get(cls)
        wrong = theirs is None or theirs.flatten_with_keys_fn is None
        recipes[cls] = _recipe(cls, "base_model_output", outputs) if wrong else None
    recipes.update({recipe.cls: recipe for recipe in cache_recipes(set(recipes), _REMEDY)})
    return recipes


def transformers_recipes_of_module(module: ModuleType) -> list[Recipe]:
    """Recipes of the caches that a model's module defines, for modules imported inside a block."""
    return cache_recipes_of_module(module, _REMEDY)


def _recipe(cls: type, suffix: str, module: Any) -> Recipe:
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
