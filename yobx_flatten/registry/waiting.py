"""Keep recipes for a library until other code imports it."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from types import ModuleType

from ..errors.failures import result_or
from ..recipe.contract import Recipe
from .locking import LOCK
from .patches import ImportHook

logger = logging.getLogger("yobx_flatten")


class Waiting:
    """Recipes that a library gets when it is imported."""

    # deliver: gives the library one recipe; called while `lock` is held
    # lock: guards the recipes that wait. A backend holds it from the question whether the library is there to the last
    # line of what it does then, so that an import in another thread comes before or after, not in between.

    def __init__(self, library: str, deliver: Callable[[Recipe], None]) -> None:
        self._library, self._deliver = library, deliver
        self._recipes: dict[type, Recipe] = {}
        self._hook = ImportHook(lambda name: name == library, self._imported)
        self._there = False
        self.lock = LOCK

    def library_is_there(self) -> bool:
        """Return whether the library can be notified right now; whatever waited for it is delivered first.

        Imports nothing, and does not wait for an import: that could wait for a thread which waits for our lock.
        """
        with self.lock:
            if not self._there:
                module = sys.modules.get(self._library)
                # importlib's own mark of a module whose import has begun and not ended
                if module is None or getattr(module.__spec__, "_initializing", False):
                    return False
                self._imported(module)
            return True

    def put(self, recipe: Recipe) -> None:
        """Notify the library now, or as soon as it is imported."""
        with self.lock:
            if self.library_is_there():
                self._deliver(recipe)
            else:
                self.add(recipe)

    def get(self, cls: type) -> Recipe | None:
        """Return the recipe that waits."""
        return self._recipes.get(cls)

    def add(self, recipe: Recipe) -> None:
        """Let a recipe wait, replacing an earlier recipe of its class."""
        with self.lock:
            if not self._recipes:
                self._hook.install()
            self._recipes[recipe.cls] = recipe

    def drop(self, recipe: Recipe) -> None:
        """Let exactly this recipe wait no longer."""
        with self.lock:
            if self._recipes.get(recipe.cls) is recipe:
                del self._recipes[recipe.cls]
                if not self._recipes:
                    self._hook.remove()

    def _imported(self, module: ModuleType) -> None:
        with self.lock:
            self._there = True
            self._hook.remove()
            recipes, self._recipes = self._recipes, {}
            for recipe in recipes.values():
                # another library's import must not fail because of us
                result_or(functools.partial(self._deliver, recipe), functools.partial(_refused, module, recipe))


def _refused(module: ModuleType, recipe: Recipe, error: Exception) -> None:
    logger.error("%s did not take %s", module.__name__, recipe.cls, exc_info=error)
