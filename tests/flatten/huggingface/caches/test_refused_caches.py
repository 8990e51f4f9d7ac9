"""What cannot be flattened without loss is refused, with its place and the way out."""

import pytest
from transformers import cache_utils

from tests.flatten.huggingface.caches.cache_cases import HAS_FLAG, made, round_trip
from yobx_flatten.errors import CacheStructureError, UnsupportedLayerError
from yobx_flatten.huggingface.caches.functions import flatten_dynamic_cache, flatten_static_cache
from yobx_flatten.huggingface.caches.layers import kind_of, kind_of_code


def break_layer(layer, broken):
    for name, value in broken.items():
        setattr(layer, name, value)


HALF_INITIALISED = [
    ({"keys": None}, "keys is None, values is Tensor"),
    ({"values": None}, "keys is Tensor, values is None"),
]
if HAS_FLAG:
    HALF_INITIALISED += [
        ({"is_initialized": False}, "keys is Tensor, values is Tensor, is_initialized is False"),
        ({"is_initialized": False, "keys": None}, "keys is None, values is Tensor"),
        ({"is_initialized": False, "values": None}, "keys is Tensor, values is None"),
    ]


@pytest.mark.parametrize(("broken", "found"), HALF_INITIALISED, ids=str)
@pytest.mark.parametrize("layout", ["DD", "DW", "WD", "WW", "SS", "SX"])
def test_a_half_initialised_layer_is_named_with_the_way_out(layout, broken, found):
    cache = made(layout)
    break_layer(cache.layers[1], broken)
    flatten = flatten_static_cache if layout[0] == "S" else flatten_dynamic_cache
    with pytest.raises(CacheStructureError) as caught:
        flatten(cache)
    message = str(caught.value)
    assert f"layers[1] is a half-initialised {type(cache.layers[1]).__name__}: {found}" in message
    assert "layer.update(keys, values)" in message
    assert "layer.reset()" in message


def test_sliding_layers_that_disagree_are_named():
    """One count serves the cache, so two different ones cannot be kept."""
    cache = made("WWW")
    cache.layers[2].cumulative_length = 9
    with pytest.raises(CacheStructureError, match=r"3 and, in layers\[2\] \(W8\), 9"):
        flatten_dynamic_cache(cache)


def test_a_sliding_layer_that_disagrees_with_the_full_one_is_named():
    """The full layer holds every token; a sliding one that has seen others cannot go on beside it."""
    cache = made("DWW")
    for layer in cache.layers[1:]:
        layer.cumulative_length = 9
    with pytest.raises(CacheStructureError, match=r"3 and, in layers\[1\] \(W8\), 9"):
        flatten_dynamic_cache(cache)


def test_a_failed_flatten_leaves_the_cache_as_it_was():
    cache = made("DW")
    cache.layers[1].cumulative_length = 9
    before = [dict(vars(layer)) for layer in cache.layers]
    with pytest.raises(CacheStructureError):
        flatten_dynamic_cache(cache)
    assert all(vars(layer).keys() == held.keys() for layer, held in zip(cache.layers, before, strict=True))
    cache.layers[1].cumulative_length = 3
    assert len(flatten_dynamic_cache(cache)[0]) == 4


def test_an_offloading_cache_is_refused_or_kept(block):
    """A rebuilt cache that silently stops offloading would run out of memory later."""
    cache = made("DD")
    cache.offloading, cache.only_non_sliding, cache.prefetch_stream = True, False, None
    try:
        rebuilt = round_trip(cache)
    except CacheStructureError:
        return
    assert rebuilt.offloading


def test_a_layer_without_its_attributes_is_refused():
    layer = made("D").layers[0]
    del layer.values
    with pytest.raises(CacheStructureError, match=r"layers\[3\].*values is None"):
        kind_of(type(layer)).is_filled(layer, 3)


def test_a_class_of_the_same_name_elsewhere_has_no_row():
    """Names alone prove nothing."""
    assert kind_of(type("DynamicLayer", (cache_utils.DynamicLayer,), {"__module__": "elsewhere"})) is None


@pytest.mark.parametrize("code", ["Q8", "", "w8", "W", "S", "Wr", "W8x", "X-1", "D8"])
def test_an_unknown_code_is_refused(code):
    """As in a program that a newer version saved."""
    with pytest.raises(UnsupportedLayerError, match="names no kind of cache layer"):
        kind_of_code(code)
