"""Make pytest tests of registered classes, and compare exported files with their model.

``recipe_tests`` makes tests from a sample of each registered class, here of the classes ``Memory`` and ``State``::

    from yobx_flatten.testing import recipe_tests

    test_recipes = recipe_tests(Memory(torch.zeros(2, 3)), State(torch.ones(2), step=4))

pytest runs eight tests for each sample, such as ``test_recipes[Memory-comes back the same]``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .diagnose.checks import check_recipe, recipe_of
from .errors import require
from .registry.recipe.roundtrip import CHECKS

__all__ = ["assert_same_as_model", "check_recipe", "recipe_tests"]


def assert_same_as_model(path: str | os.PathLike[str], model: Any, **options: Any) -> None:
    """Raise ``AssertionError`` unless a file from any exporter computes the same outputs as its model.

    Args:
        path: the file, or a folder of files; see :func:`~yobx_flatten.verify.verify_file`.
        model: the model from which the file was exported, or the name of the model.
        **options: further arguments of :func:`~yobx_flatten.verify.verify_file`: ``cases``, ``names``, ``trust``.

    Raises:
        AssertionError: when outputs differ from the model's or cannot be compared; the message is a table of cases.
    """
    from .verify.verify_file import verify_file

    found = verify_file(path, model, **options)
    if not found:
        raise AssertionError(str(found))


def recipe_tests(*samples: Any) -> Callable[..., None]:
    """Return a pytest function that tests, with the given instances, the flatten functions of their classes.

    Args:
        samples: instances of the classes to test; the classes must be registered when the tests run.

    Returns:
        A function to assign to a name ``test_...``. pytest runs it once for each sample and each check of
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
