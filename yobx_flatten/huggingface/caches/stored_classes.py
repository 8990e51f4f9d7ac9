"""Resolve class names in the leaf names of a cache, among classes already defined. Nothing is imported."""

from __future__ import annotations

import sys
from typing import Any

from ...errors import CacheStructureError
from ...recipe.safe_names import import_known


def layer_class(name: object) -> type:
    """Return the class of a layer that a name states."""
    import transformers.cache_utils as cache_utils

    names = ("CacheLayerMixin", "LinearAttentionCacheLayerMixin")
    bases = tuple(base for base in (getattr(cache_utils, base, None) for base in names) if base is not None)
    found = _class_named(name)
    # the layer that stands where a model has none derives from neither
    of_library = found is not None and found.__module__ == cache_utils.__name__ and found.__name__.endswith("Layer")
    if found is None or not (of_library or issubclass(found, bases)):
        raise CacheStructureError(
            f"The names of a cache hold {name!r}, not a class of layers that is defined here. If it is "
            "one, import its module first."
        )
    return found


def part_class(name: object) -> type:
    """Return the class of a part of a layer: of a model library's own caches, or of what quantises them."""
    found = _class_named(name)
    module, _, qualified = str(name).partition(":")
    of_quanto = module.startswith("optimum.quanto.") and "Optimizer" in qualified
    of_transformers = module.startswith("transformers.") and "Cache" in qualified
    if found is None or not (of_quanto or of_transformers):
        raise CacheStructureError(f"The names of a cache hold {name!r}, not a part of a layer defined here.")
    return found


def _class_named(name: object) -> type | None:
    if not isinstance(name, str):
        return None
    module, _, qualified = name.partition(":")
    import_known(module)
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = vars(found).get(part) if isinstance(found, (type(sys), type)) else None
    borne = isinstance(found, type) and f"{found.__module__}:{found.__qualname__}" == name
    return found if borne and not hasattr(found, "__del__") else None
