"""Import private names of other libraries on first use, in one file per library; no other module imports them."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Private(NamedTuple):
    module: str
    name: str  # its name in the module, with dots for an attribute of a class
    instead: str  # replacement for releases without the name


def lookup_in(library: str, names: Mapping[str, Private]) -> Callable[[str], Any]:
    """Return a module-level ``__getattr__`` that looks up private names of a library."""
    # names: the location of each private name, by the name that the module provides

    @functools.cache
    def find(name: str) -> Any:
        private = names[name]
        try:
            found: Any = importlib.import_module(private.module)
            for part in private.name.split("."):
                if not hasattr(found, part):  # a module that is not imported yet
                    importlib.import_module(f"{found.__name__}.{part}")
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"{library} {importlib.metadata.version(library)} has no {private.module}.{private.name}, which this "
                f"project uses. Install a {library} version that yobx-flatten env shows as tested, or replace the name "
                f"in yobx_flatten/core/private_names: {private.instead}."
            ) from error
        return found

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(name)
        return find(name)

    return __getattr__
