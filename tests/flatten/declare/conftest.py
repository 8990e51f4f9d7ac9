"""What is registered before a test of registrations and blocks begins, and what must be there when it ends."""

from collections.abc import Iterator

import pytest

from tests import registry_snapshot
from tests.flatten import other_libraries
from tests.flatten.pair import FUNCTIONS, Pair
from yobx_flatten import register_class_flattening, unregister_class_flattening


@pytest.fixture
def before() -> registry_snapshot.Snapshot:
    return registry_snapshot.take()


@pytest.fixture
def registered() -> Iterator[type[Pair]]:
    register_class_flattening(Pair, *FUNCTIONS)
    yield Pair
    unregister_class_flattening(Pair)


@pytest.fixture
def registered_by_others() -> Iterator[type[Pair]]:
    with other_libraries.forgotten_afterwards(Pair):
        other_libraries.register(Pair, name="theirs")
        yield Pair


@pytest.fixture(params=["named", "unnamed", "with a rule of torch.fx"])
def cache_of_others(request: pytest.FixtureRequest) -> Iterator[None]:
    """`DynamicCache`, registered through torch's public functions; `Pair` is free for a class after it."""
    from transformers import DynamicCache

    with other_libraries.forgotten_afterwards(DynamicCache, Pair):
        name = None if request.param == "unnamed" else "theirs"
        other_libraries.register(DynamicCache, name=name, fx=request.param.endswith("fx"))
        yield


@pytest.fixture
def left_as_found() -> Iterator[None]:
    """All tables and all patched attributes; the test fails if they differ at its end."""
    from tests.flatten.declare.blocks import everything_patched

    tables, patched = registry_snapshot.take(), everything_patched()
    yield
    assert registry_snapshot.changes_since(tables) == []
    assert [a is b for a, b in zip(patched, everything_patched(), strict=True)] == [True] * len(patched)
