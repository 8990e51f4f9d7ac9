"""The block in which caches are nodes."""

from collections.abc import Iterator

import pytest

from yobx_flatten import register_flattening_functions


@pytest.fixture
def block() -> Iterator[None]:
    with register_flattening_functions(patch_transformers=True):
        yield
