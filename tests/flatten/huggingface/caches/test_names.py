"""The leaves of a cache are its own tensors, named by layer and kind."""

import pytest
from transformers import cache_utils

from tests.flatten.huggingface.caches.cache_cases import HAS_POSITION, made
from tests.models import WINDOW, new_cache
from yobx_flatten.huggingface.caches.functions import (
    flatten_dynamic_cache,
    flatten_static_cache,
    unflatten_dynamic_cache,
)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("DDD", ["key_0", "value_0", "key_1", "value_1", "key_2", "value_2"]),
        ("DWD", ["key_D_0", "value_D_0", "key_W8_1", "value_W8_1", "key_D_2", "value_D_2"]),
    ],
)
def test_names_state_the_kinds_of_layers_where_there_are_several(layout, expected):
    """The length of sliding layers is that of a full layer, so it needs no leaf."""
    leaves, names = flatten_dynamic_cache(made(layout))
    assert names == expected
    assert len(leaves) == 6


def test_a_cache_of_sliding_layers_ends_in_its_length():
    """No leaf's shape tells how many tokens were seen, so one integer leaf does."""
    leaves, names = flatten_dynamic_cache(made("WW", length=12))
    assert names == ["key_W8_0", "value_W8_0", "key_W8_1", "value_W8_1", "length"]
    assert leaves[-1] == 12
    assert [tuple(leaf.shape) for leaf in leaves[:-1]] == [(2, 2, 7, 4)] * 4


def test_static_layers_list_the_tensor_they_count_with():
    """Sliding ones count in an integer beside it, one for the whole cache."""
    leaves, names = flatten_static_cache(made("SX", length=12))
    if HAS_POSITION:
        assert names == [
            *("key_S16_0", "value_S16_0", "position_S16_0"),
            *("key_X8_1", "value_X8_1", "position_X8_1", "length"),
        ]
        assert [int(leaves[2]), leaves[-1]] == [12, 12]
    else:
        assert names == ["key_S16_0", "value_S16_0", "key_X8_1", "value_X8_1", "length"]
        assert leaves[-1] == 12


def test_a_cache_of_full_static_layers_has_no_length():
    """A full static layer knows its position from its own tensors."""
    names = flatten_static_cache(made("SS"))[1]
    assert "length" not in names
    assert [name for name in names if name.startswith("key")] == ["key_S16_0", "key_S16_1"]


def test_layers_that_hold_nothing_keep_their_place():
    """Left out, they would shift every later layer to another layer's tensors."""
    cache = made("WDW")
    cache.layers[0] = cache_utils.DynamicSlidingWindowLayer(WINDOW)
    cache.layers[2] = cache_utils.DynamicSlidingWindowLayer(WINDOW)
    leaves, names = flatten_dynamic_cache(cache)
    assert names == ["none_W8_0", "key_D_1", "value_D_1", "none_W8_2"]
    rebuilt = unflatten_dynamic_cache(leaves, names)
    assert [layer.keys for layer in rebuilt.layers] == [None, leaves[0], None]
    assert [type(layer).__name__ for layer in rebuilt.layers] == [type(x).__name__ for x in cache.layers]


def test_the_layers_of_a_fresh_static_cache_keep_their_place():
    """A static cache that was never used has no leaves, and all its layers."""
    cache = new_cache("gemma2", static=True)
    leaves, names = flatten_static_cache(cache)
    assert (leaves, names) == ([], ["none_X8_0", "none_S32_1"])
