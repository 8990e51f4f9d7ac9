"""The leaves of a cache are its own tensors, named by layer and kind; names without a size are of newer releases."""

import pytest
import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from tests.flatten.huggingface.caches.cache_cases import HAS_POSITION, made
from tests.models import WINDOW
from yobx_flatten import flatten_dynamic_cache, flatten_static_cache, unflatten_dynamic_cache, unflatten_static_cache
from yobx_flatten.errors import UnsupportedLayerError


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


def keys(*lengths):
    return [torch.randn(1, 2, length, 4) for length in lengths]


def test_the_window_of_a_layer_is_that_of_its_keys():
    leaves = keys(6, 6, 5, 5)
    cache = unflatten_dynamic_cache(iter(leaves), ["key_D_0", "value_D_0", "key_W_1", "value_W_1"])
    assert [type(layer) for layer in cache.layers] == [DynamicLayer, DynamicSlidingWindowLayer]
    assert cache.layers[1].sliding_window == 5
    assert [cache.layers[1].keys is leaves[2], cache.layers[1].values is leaves[3]] == [True, True]
    assert flatten_dynamic_cache(cache)[1][:4] == ["key_D_0", "value_D_0", "key_W5_1", "value_W5_1"]


def test_a_static_layer_has_room_for_its_keys():
    cache = unflatten_static_cache(keys(7, 7), ["key_S_0", "value_S_0"])
    assert (type(cache.layers[0]), cache.layers[0].max_cache_len) == (StaticLayer, 7)


def test_placeholders_without_a_size_are_refused():
    with pytest.raises(UnsupportedLayerError, match="'W' names no kind of cache layer"):
        unflatten_dynamic_cache([object(), object()], ["key_W_0", "value_W_0"])
