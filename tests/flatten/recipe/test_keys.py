"""Keys of other libraries become torch's."""

import pytest
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey

from yobx_flatten.recipe.fields import torch_key


@pytest.mark.parametrize("key", [GetAttrKey("a"), MappingKey("a"), SequenceKey(0)])
def test_a_key_of_torch_stays(key):
    """The very object."""
    assert torch_key(key) is key


@pytest.mark.parametrize(
    ("key", "expected"), [(0, SequenceKey(0)), ("a", MappingKey("a")), ((1, 2), MappingKey((1, 2)))]
)
def test_a_bare_key_is_a_position_or_a_mappings(key, expected):
    """JAX takes any object for a key."""
    assert torch_key(key) == expected


def test_keys_of_jax_are_translated():
    """By what they hold."""
    tree_util = pytest.importorskip("jax.tree_util", reason="jax is not installed")
    keys = [tree_util.GetAttrKey("a"), tree_util.DictKey("a"), tree_util.SequenceKey(2), tree_util.FlattenedIndexKey(3)]
    assert list(map(torch_key, keys)) == [GetAttrKey("a"), MappingKey("a"), SequenceKey(2), SequenceKey(3)]
