"""Tests for registered classes: one test per class and check.

::

    from yobx_flatten.testing import recipe_tests

    test_recipes = recipe_tests(Memory(torch.zeros(2, 3)), State(torch.ones(2), step=4))

pytest then runs ``test_recipes[Memory-comes back the same]`` and seven more for each sample. This module needs pytest;
nothing else imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .diagnose.conformance import check_recipe, recipe_of
from .errors.dependencies import require
from .recipe.roundtrip import CHECKS

__all__ = ["check_recipe", "recipe_tests"]


def recipe_tests(*samples: Any) -> Callable[..., None]:
    """Make a test that checks the registrations of the samples' classes; assign it to a ``test_...`` name.

    Args:
        samples: instances; their classes must be registered when the tests run, not before.

    Returns:
        A function that pytest runs once for each sample and each check of
        :func:`~yobx_flatten.check_recipe`.

    Raises:
        MissingDependencyError: when pytest is not installed.
    """
    require("pytest", purpose="recipe_tests")
    import pytest

    def test_recipe(sample: object, check: str) -> None:
        CHECKS[check](recipe_of(type(sample)), sample)

    names = [type(sample).__qualname__ for sample in samples]
    parametrized = pytest.mark.parametrize("sample", samples, ids=names)(test_recipe)
    made: Callable[..., None] = pytest.mark.parametrize("check", CHECKS)(parametrized)
    return made
