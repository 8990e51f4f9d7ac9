"""Names without a size, as newer releases of yobx write them."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from yobx_flatten import flatten_dynamic_cache, unflatten_dynamic_cache, unflatten_static_cache
from yobx_flatten.errors import UnsupportedLayerError


def keys(*lengths):
    return [torch.randn(1, 2, length, 4) for length in lengths]


def test_the_window_of_a_layer_is_that_of_its_keys():
    """A full layer before a sliding one; the leaves are the very same tensors, and the names state the window again."""
    leaves = keys(6, 6, 5, 5)
    cache = unflatten_dynamic_cache(iter(leaves), ["key_D_0", "value_D_0", "key_W_1", "value_W_1"])
    assert [type(layer) for layer in cache.layers] == [DynamicLayer, DynamicSlidingWindowLayer]
    assert cache.layers[1].sliding_window == 5
    assert [cache.layers[1].keys is leaves[2], cache.layers[1].values is leaves[3]] == [True, True]
    assert flatten_dynamic_cache(cache)[1][:4] == ["key_D_0", "value_D_0", "key_W5_1", "value_W5_1"]


def test_a_static_layer_has_room_for_its_keys():
    """All of its length is there from the start."""
    cache = unflatten_static_cache(keys(7, 7), ["key_S_0", "value_S_0"])
    assert (type(cache.layers[0]), cache.layers[0].max_cache_len) == (StaticLayer, 7)


def test_placeholders_without_a_size_are_refused():
    """They have no keys to read it off."""
    with pytest.raises(UnsupportedLayerError, match="'W' names no kind of cache layer"):
        unflatten_dynamic_cache([object(), object()], ["key_W_0", "value_W_0"])
