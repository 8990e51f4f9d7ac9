"""List what the installed transformers has and our tables do not know: ``python -m matrix.newest_unknown``, as JSON.

Model types that the recorded matrix has no row for; classes of layers and caches that are not in the Flattening List;
outputs that neither that list nor transformers' own registration flattens. The code of all models is imported for it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Iterable
from typing import Any

from .models import type_names
from .results import Results, recorded_file

__all__ = ["import_models", "unknown", "unknown_classes"]

# Bases of layers: no cache holds one of them itself.
_BASES = {"Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "QuantizedLayer"}


def import_models() -> list[str]:
    """Import the code of all models; return the modules that cannot be imported here."""
    import transformers.models as models

    failed = []
    for package in pkgutil.iter_modules(models.__path__, "transformers.models."):
        if not package.ispkg:
            continue
        folder = importlib.import_module(package.name)
        for module in pkgutil.iter_modules(folder.__path__, f"{package.name}."):
            if module.name.rpartition(".")[2].startswith("modeling_"):
                try:
                    importlib.import_module(module.name)
                except Exception:  # it needs a library that is not here, or is for another framework
                    failed.append(module.name)
    return failed


def unknown_classes(known: Iterable[str]) -> dict[str, list[str]]:
    """Return the classes of imported modules that are not flattened, by kind.

    Args:
        known: modules and names of the classes of the Flattening List.
    """
    import torch.utils._pytree as pytree
    import transformers.cache_utils as cache_utils
    from transformers.utils.generic import ModelOutput

    from yobx_flatten.huggingface.outputs import subclasses_of

    layers = [getattr(cache_utils, name) for name in sorted(_BASES) if name != "Cache" and hasattr(cache_utils, name)]
    held = set(known)

    def left(*bases: Any, registered: Iterable[type] = ()) -> list[str]:
        classes = {cls for base in bases for cls in subclasses_of(base)}.difference(registered)
        names = {
            f"{cls.__module__}.{cls.__qualname__}"
            for cls in classes
            if cls.__name__ not in _BASES and not inspect.isabstract(cls)
        }
        return sorted(names - held)

    outputs = left(ModelOutput, registered=pytree.SUPPORTED_NODES)
    return {"cache layers": left(*layers), "caches": left(cache_utils.Cache), "outputs": outputs}


def unknown() -> dict[str, list[str]]:
    """Return all that no table knows."""
    from yobx_flatten import flattening_list

    recorded = Results.read(recorded_file("matrix"))
    failed = import_models()
    return {
        "model types": sorted(set(type_names()) - set(recorded.types)),
        **unknown_classes(row.cls for row in flattening_list()),
        "modules that cannot be imported here": failed,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(unknown()) + "\n")
