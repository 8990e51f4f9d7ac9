"""Caches made of given tensors behave as those that a model has filled."""

import copy
import functools

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache, StaticCache

from tests.models import WINDOW, continued_alike, go_on, start
from yobx_flatten import register_flattening_functions
from yobx_flatten.errors import CacheStructureError
from yobx_flatten.huggingface.builders import make_dynamic_cache, make_encoder_decoder_cache, make_static_cache

STATIC_SLIDING = (
    "StaticSlidingWindowLayer" if hasattr(cache_utils, "StaticSlidingWindowLayer") else "SlidingWindowLayer"
)


def pairs(count=2, length=3):
    return [(torch.randn(2, 2, length, 4), torch.randn(2, 2, length, 4)) for _ in range(count)]


# -- dynamic


def in_turn(given):
    return [tensor for pair in given for tensor in pair]


@pytest.mark.parametrize("form", [list, iter, in_turn])
def test_the_tensors_are_held_as_they_are(form):
    given = pairs()
    cache = make_dynamic_cache(form(given))
    assert type(cache) is DynamicCache
    assert [type(layer) for layer in cache.layers] == [DynamicLayer] * 2
    for layer, (keys, values) in zip(cache.layers, given, strict=True):
        assert layer.keys is keys
        assert layer.values is values


def test_no_pairs_make_an_empty_cache_that_grows():
    cache = make_dynamic_cache([])
    assert cache.layers == []
    cache.update(*pairs(1)[0], 0)
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize(
    "classes",
    ["DynamicSlidingWindowLayer", cache_utils.DynamicSlidingWindowLayer, ["DynamicSlidingWindowLayer"] * 2],
    ids=["name", "class", "one per layer"],
)
@pytest.mark.parametrize("options", [{"sliding_window": 8}, [{"sliding_window": 8}] * 2], ids=["one", "each"])
def test_classes_and_options_are_for_all_layers_or_for_each(classes, options):
    cache = make_dynamic_cache(pairs(), classes, options)
    assert [layer.sliding_window for layer in cache.layers] == [8, 8]


def test_sliding_layers_have_seen_what_the_full_layer_holds():
    """Their own tensors do not tell, once the window is full."""
    given = [pairs(1, 7)[0], pairs(1, 12)[0]]
    cache = make_dynamic_cache(given, ["DynamicSlidingWindowLayer", "DynamicLayer"], [{"sliding_window": 8}, {}])
    assert cache.layers[0].cumulative_length == 12


def test_sliding_layers_alone_have_seen_what_they_hold():
    cache = make_dynamic_cache(pairs(), "DynamicSlidingWindowLayer", {"sliding_window": 8})
    assert [layer.cumulative_length for layer in cache.layers] == [3, 3]


@pytest.mark.parametrize("past", [WINDOW - 3, WINDOW + 4])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_a_cache_made_of_a_models_tensors_goes_on_as_the_models(name, past):
    started = start(name, past=past)
    layers = started.cache.layers
    made = make_dynamic_cache(
        [(layer.keys, layer.values) for layer in layers],
        [type(layer) for layer in layers],
        [{"sliding_window": WINDOW} if type(layer) is not DynamicLayer else {} for layer in layers],
    )
    assert continued_alike(started, made)


# -- static


def test_static_keys_of_full_length_are_held_as_they_are():
    """Then writing into the cache writes into them, as static caches do."""
    given = pairs(1, 16)
    cache = make_static_cache(given, length=3)
    assert type(cache) is StaticCache
    assert cache.layers[0].keys is given[0][0]
    assert int(getattr(cache.layers[0], "cumulative_length", 3)) == 3
    assert cache.layers[0].max_cache_len == 16


def test_shorter_static_keys_are_followed_by_zeros():
    given = pairs(1, 3)
    keys = make_static_cache(given, 5).layers[0].keys
    assert keys.shape == (2, 2, 5, 4)
    assert torch.equal(keys[:, :, :3], given[0][0])
    assert torch.equal(keys[:, :, 3:], torch.zeros(2, 2, 2, 4))


@pytest.mark.parametrize("past", [WINDOW - 3, WINDOW + 4])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mistral"])
def test_a_static_cache_made_of_a_models_tensors_goes_on_as_the_models(name, past):
    started = start(name, past=past, static=True)
    layers = copy.deepcopy(started.cache).layers
    made = make_static_cache(
        [(layer.keys, layer.values) for layer in layers],
        32,
        [type(layer) for layer in layers],
        [{} if type(layer) is cache_utils.StaticLayer else {"sliding_window": WINDOW} for layer in layers],
        length=past,
    )
    for layer in made.layers:
        own = vars(layer).keys() - {"is_initialized"}
        assert own == vars(layers[made.layers.index(layer)]).keys() - {"is_initialized"}
    assert continued_alike(started, made)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_static_cache_may_be_made_of_a_dynamic_ones_keys(name):
    past = WINDOW - 3
    started, static = start(name, past=past), start(name, past=past, static=True)
    made = make_static_cache(
        [(layer.keys, layer.values) for layer in started.cache.layers],
        32,
        [type(layer) for layer in static.cache.layers],
        [{} if type(layer) is cache_utils.StaticLayer else {"sliding_window": WINDOW} for layer in static.cache.layers],
    )
    for a, b in zip(go_on(static, made, steps=4), go_on(static, steps=4), strict=True):
        torch.testing.assert_close(a, b)


# -- encoder and decoder


def test_an_encoder_decoder_cache_knows_which_layers_are_filled():
    own, cross = make_dynamic_cache(pairs()), make_dynamic_cache(pairs(2, 6))
    cache = make_encoder_decoder_cache(own, cross)
    assert type(cache) is EncoderDecoderCache
    assert cache.self_attention_cache is own
    assert cache.cross_attention_cache is cross
    assert cache.is_updated == {0: True, 1: True}
    assert make_encoder_decoder_cache(own, DynamicCache()).is_updated == {}


def test_a_window_that_is_not_given_is_as_long_as_the_keys():
    cache = make_dynamic_cache(
        [(torch.zeros(1, 2, length, 4),) * 2 for length in (3, 5, 3)],
        "DynamicSlidingWindowLayer",
        [{}, {}, {"sliding_window": 9}],
    )
    assert [layer.sliding_window for layer in cache.layers] == [3, 5, 9]


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=["two dimensions", "three dimensions"])
@pytest.mark.parametrize("cls", ["DynamicLayer", "DynamicSlidingWindowLayer"])
def test_placeholders_of_fewer_dimensions_come_apart_and_together(shape, cls):
    """Examples of registrations and of storage use them; the axis before the last is the length."""
    given = [(torch.rand(shape), torch.rand(shape)) for _ in range(2)]
    with register_flattening_functions(patch_transformers=True):
        cache = make_dynamic_cache(given, cls)
        assert cache.get_seq_length() == 3
        leaves, spec = tree_flatten(cache)
        rebuilt = tree_unflatten(leaves, spec)
    held = [tensor for layer in rebuilt.layers for tensor in (layer.keys, layer.values)]
    assert all(a is b for a, b in zip(held, (x for pair in given for x in pair), strict=True))


# -- bad input


@pytest.mark.parametrize("make", [make_dynamic_cache, make_static_cache])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([torch.zeros(1, 2, 3, 4)] * 3, r"flat list of 3 tensors; give keys and values in turn"),
        ([(torch.zeros(1, 2, 3, 4),)], r"key_value_pairs\[0\] must be a pair .* found \[\(1, 2, 3, 4\)\]"),
        ([(torch.zeros(1, 2, 3, 4),) * 2, (torch.zeros(3),) * 2], r"key_value_pairs\[1\] .* \[\(3,\), \(3,\)\]"),
        ([(torch.zeros(1, 2, 3, 4), None)], r"key_value_pairs\[0\] .*None"),
    ],
    ids=["odd", "single", "one dimension", "none"],
)
def test_what_is_no_pair_is_named(make, given, message):
    with pytest.raises(CacheStructureError, match=message):
        make(given)


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (make_dynamic_cache, (pairs(), ["DynamicLayer"]), "cls_layers has 1 entries for 2 layers; give one per layer"),
        (make_dynamic_cache, (pairs(), "DynamicLayer", [{}, {}, {}]), "cls_kwargs has 3 entries for 2 layers"),
        (make_dynamic_cache, (pairs(), "StaticLayer"), r"cls_layers: .* is not one of \['DynamicLayer', "),
        (make_dynamic_cache, (pairs(), cache_utils.StaticLayer), r"cls_layers: .* is not one of \['DynamicLayer', "),
        (make_dynamic_cache, (pairs(), "Nonsense"), r"cls_layers: .* is not one of \['DynamicLayer', "),
        (make_dynamic_cache, (pairs(), int), r"cls_layers: .* is not one of \['DynamicLayer', "),
        (make_dynamic_cache, (pairs(1, 0), "DynamicSlidingWindowLayer"), r"layer takes \{'sliding_window': 8\}"),
        (make_static_cache, ([(torch.zeros(2, 3, 4),) * 2],), r"\[0\] must be a pair .* \[\(2, 3, 4\), \(2, 3, 4\)\]"),
        (make_static_cache, ([],), "key_value_pairs is empty"),
        (make_static_cache, (pairs(1, 5), 4), "hold 5 tokens, but the layer has room for 4"),
        (
            make_static_cache,
            (pairs(1, 5), 16, STATIC_SLIDING, {"sliding_window": 4}),
            "hold 5 tokens, but the layer has room for 4",
        ),
        (functools.partial(make_static_cache, length=-1), (pairs(1, 16),), "length"),
        (functools.partial(make_static_cache, length=17), (pairs(1, 16),), "length"),
    ],
)
def test_what_does_not_fit_is_refused(make, given, message):
    with pytest.raises(CacheStructureError, match=message):
        make(*given)


def test_a_subclass_stays_the_class_it_is():
    """Also one of the same name: a class is no name."""
    own = type("DynamicLayer", (DynamicLayer,), {})
    assert {type(layer) for layer in make_dynamic_cache(pairs(), own).layers} == {own}
