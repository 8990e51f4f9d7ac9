"""List the transformers model classes that are imported so far, without importing any."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


def classes_of(module: ModuleType) -> list[type]:
    """Return the classes that a module defines."""
    return [cls for cls in list(vars(module).values()) if inspect.isclass(cls) and cls.__module__ == module.__name__]


def subclasses_of(cls: Any) -> Iterator[type]:
    """Yield the subclasses of a class that are defined so far, with those of subclasses."""
    for child in cls.__subclasses__():
        yield child
        yield from subclasses_of(child)


class ModelClasses:
    """The classes of imported model modules that pass a test. A module is looked at once."""

    def __init__(self, fits: Callable[[Any], bool]) -> None:
        self._fits = fits
        self._by_module: dict[str, list[type]] = {}
        self._modules_then = 0
        self._found: list[type] = []

    def __call__(self) -> list[type]:
        """Return them, in the order of the imports."""
        if self._modules_then != len(sys.modules):  # blocks are entered often, models imported rarely
            # In one step: while a list of the items is made, memory may be collected, and another thread may import.
            imported = sys.modules.copy()
            modules = [item for item in imported.items() if item[0].startswith("transformers.models.")]
            for name, module in modules:
                if name not in self._by_module:
                    self._by_module[name] = [cls for cls in classes_of(module) if self._fits(cls)]
            self._modules_then = len(imported)
            self._found = [cls for name, _ in modules for cls in self._by_module[name]]
        return self._found.copy()
