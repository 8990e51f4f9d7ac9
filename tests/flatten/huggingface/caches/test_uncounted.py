"""A sliding layer that holds keys and counted none was filled by hand: it has seen what the others have."""

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tests.models import WINDOW, continued_alike, start
from yobx_flatten.errors import CacheStructureError
from yobx_flatten.huggingface.caches.functions import flatten_dynamic_cache, unflatten_dynamic_cache


def made_by_hand(kinds, counts, length=3):
    """Layers D and W that hold `length` keys, and what each says that it has seen."""
    cache = DynamicCache()
    cache.layers = [DynamicLayer() if kind == "D" else DynamicSlidingWindowLayer(8) for kind in kinds]
    for layer, count in zip(cache.layers, counts, strict=True):
        layer.update(torch.ones(1, 2, length, 4), torch.ones(1, 2, length, 4))
        if count is not None:
            layer.cumulative_length = count
    return cache


@pytest.mark.parametrize(
    ("kinds", "counts", "expected"),
    [
        ("DW", (None, 0), [3]),
        ("WD", (0, None), [3]),
        ("DWW", (None, 0, 3), [3, 3]),
        ("WW", (0, 0), [3, 3]),
        ("WW", (9, 0), [9, 9]),
        ("WW", (0, 9), [9, 9]),
    ],
)
def test_it_has_seen_what_a_full_layer_or_another_one_has(kinds, counts, expected):
    """Else what it holds. The layers that were given keep what they say."""
    cache = made_by_hand(kinds, counts)
    for _ in range(2):  # the second time layers of these classes are known
        rebuilt = unflatten_dynamic_cache(*flatten_dynamic_cache(cache))
        assert [layer.cumulative_length for layer in rebuilt.layers if type(layer) is not DynamicLayer] == expected
    assert [getattr(layer, "cumulative_length", None) for layer in cache.layers] == list(counts)


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_it_goes_on_as_a_model_that_filled_it(name):
    """The same next logits as with the cache of which the counters were lost."""
    begun, other = (start(name, past=WINDOW - 3) for _ in range(2))
    for layer in other.cache.layers:
        if type(layer) is DynamicSlidingWindowLayer:
            layer.cumulative_length = 0
    rebuilt = unflatten_dynamic_cache(*flatten_dynamic_cache(other.cache))
    assert continued_alike(begun, rebuilt)


def test_more_keys_than_a_full_layer_holds_are_refused():
    """Nothing could have filled it so."""
    cache = made_by_hand("DW", (None, 0))
    cache.layers[1].keys = cache.layers[1].values = torch.ones(1, 2, 5, 4)
    with pytest.raises(CacheStructureError, match=r"seen different numbers of tokens: 3 and, in layers\[1\] \(W8\), 0"):
        flatten_dynamic_cache(cache)


def test_a_layer_that_holds_no_keys_has_seen_none():
    """An emptied layer is no riddle."""
    cache = made_by_hand("W", (0,))
    cache.layers[0].keys = cache.layers[0].values = torch.ones(1, 2, 0, 4)
    leaves, names = flatten_dynamic_cache(cache)
    assert (leaves[-1], names[-1]) == (0, "length")
