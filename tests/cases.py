"""Which cases of a claim `make test` runs, where each takes seconds, and how many examples of a property."""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return the cases of a claim; `make test` runs the quick ones, `make extended` the others."""
    values = list(values)
    unknown = [value for value in quick if value not in values]
    if unknown or not quick:
        raise ValueError(f"Quick cases must be some of {values}, found {quick}.")
    return [value if value in quick else _extended(value) for value in values]


def examples(count: int) -> int:
    """Return how many examples a property draws: all in CI, and a third, other ones each time, in `make test`."""
    return count if os.environ.get("CI") else max(1, count // 3)


def _extended(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.extended)
