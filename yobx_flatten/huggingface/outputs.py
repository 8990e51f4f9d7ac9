"""Output classes as nodes: transformers' ``BaseModelOutput``, diffusers' ``BaseOutput`` family.

transformers registers every ``ModelOutput`` itself, once, when the class is made; taken away it would be gone for the
rest of the process. Its registration is right in all supported versions, so it is left in force.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils._pytree import MappingKey

from ..fields import functions_of
from ..recipe import Recipe

__all__ = [
    "diffusers_recipes",
    "flatten_base_model_output",
    "flatten_with_keys_base_model_output",
    "unflatten_base_model_output",
]


def flatten_base_model_output(output: Any) -> tuple[list[Any], list[str]]:
    """Take a ``BaseModelOutput`` apart into the fields that are set, and their names."""
    return list(output.values()), list(output.keys())


def flatten_with_keys_base_model_output(output: Any) -> tuple[list[tuple[Any, Any]], list[str]]:
    """Take a ``BaseModelOutput`` apart into the fields that are set, each with its key."""
    values, names = flatten_base_model_output(output)
    return [(MappingKey(name), value) for name, value in zip(names, values, strict=True)], names


def unflatten_base_model_output(values: Iterable[Any], context: list[str], output_type: type | None = None) -> Any:
    """Put a ``BaseModelOutput`` together, or another output class given as ``output_type``."""
    if output_type is None:
        from transformers.modeling_outputs import BaseModelOutput

        output_type = BaseModelOutput
    return output_type(**dict(zip(context, values, strict=True)))


def diffusers_recipes() -> list[Recipe]:
    """Recipes of the diffusers output classes that are defined so far (those of imported pipelines and models).

    diffusers registers them with torch without keys, so an exported program cannot name its outputs.
    """
    base = sys.modules["diffusers.utils.outputs"].BaseOutput
    recipes = []
    for cls in _subclasses(base):
        flatten, flatten_with_keys, unflatten = functions_of(cls)
        name = f"yobx_flatten.diffusers:{cls.__module__}.{cls.__qualname__}"
        remedy = "with register_flattening_functions(patch_diffusers=True): ..."
        recipes.append(Recipe(cls, flatten, unflatten, flatten_with_keys, name, remedy))
    return recipes


def _subclasses(cls: Any) -> Iterator[type]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)
