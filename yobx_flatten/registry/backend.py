"""The interface of a library's table: read a class's entry, write a recipe, restore what was found."""

from __future__ import annotations

from typing import Any, Protocol

from ..recipe.contract import Recipe


class Backend(Protocol):
    """One library's table of classes.

    ``read`` returns whatever the library holds for a class, as an opaque value that compares by identity of the
    functions, or ``None`` when it holds nothing. ``restore`` brings exactly that back. Each call either does all of its
    work or raises before it changed anything.
    """

    name: str

    def read(self, cls: type) -> Any:
        """Return all that the library holds for ``cls``, or ``None``."""

    def holds(self, recipe: Recipe) -> bool:
        """Return whether the library holds exactly this recipe for its class."""

    def write(self, recipe: Recipe) -> None:
        """Register the recipe, in place of what is there."""

    def restore(self, recipe: Recipe, found: Any) -> None:
        """Take the recipe out and bring back ``found``, a value that ``read`` returned before ``write``."""
