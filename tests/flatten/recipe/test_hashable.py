"""Static data becomes a cache key, and comes back as it was."""

import pytest

from yobx_flatten.recipe.contract import HeldStatic, hashable, original

UNHASHABLE = [["a", 1], {"a": [1, 2], "b": {"c": None}}, ([1], "x"), {1, 2}, [slice(1, 2), {3}]]


@pytest.mark.parametrize("static", [None, "relu", 3, (1, "a"), frozenset({1})])
def test_what_hashes_stays_as_it_is(static):
    """The very object: JAX shows it in its messages."""
    assert hashable(static) is static
    assert original(static) is static


@pytest.mark.parametrize("static", UNHASHABLE, ids=repr)
def test_what_does_not_hash_is_held(static):
    """Equal data, equal keys; and the data comes back."""
    key, again = hashable(static), hashable(static)
    assert type(key) is HeldStatic
    assert key == again
    assert hash(key) == hash(again)
    assert original(key) == static
    assert repr(key) == repr(static)


@pytest.mark.parametrize(("one", "other"), [([1], [2]), ([1], (1,)), ({"a": 1}, {"a": 2}), ([1], {1})])
def test_other_data_is_another_key(one, other):
    """Also across types."""
    assert hashable(one) != hashable(other)


def test_changing_the_data_does_not_change_the_key():
    """What goes in is copied, and what comes out as well."""
    static = {"names": ["a"]}
    key = hashable(static)
    static["names"].append("b")
    original(key)["names"].append("c")
    assert original(key) == {"names": ["a"]}
    assert key == hashable({"names": ["a"]})
