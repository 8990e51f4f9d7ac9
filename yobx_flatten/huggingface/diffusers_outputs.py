"""Flatten outputs of diffusers: one child per field that is set; the field names are static.

diffusers registers its outputs with torch without keys, so that an exported program cannot name its outputs. The
flatten functions in this file add the keys. Names and static parts are stored as diffusers' registration stores them: a
program that was saved inside the block loads outside, and vice versa.
"""

from __future__ import annotations

import sys

from ..recipe.contract import Recipe
from ..recipe.fields import functions_of
from ..trace.trace_settings import TraceSupport
from .outputs import subclasses_of

_REMEDY = "with register_flattening_functions(patch_diffusers=True): ..."


def diffusers_recipes(module: str | None = None) -> list[Recipe]:
    """Return the flatten functions of diffusers' output classes in one module, or in all imported modules."""
    base = sys.modules["diffusers.utils.outputs"].BaseOutput
    recipes = []
    for cls in subclasses_of(base):
        if module is None or cls.__module__ == module:
            flatten, flatten_with_keys, unflatten = functions_of(cls)
            name = f"{cls.__module__}.{cls.__name__}"
            recipes.append(Recipe(cls, flatten, unflatten, flatten_with_keys, name, _REMEDY, plain_static=True))
    return recipes


DIFFUSERS = TraceSupport("diffusers")  # nothing for a trace, and imports of named classes for a load
