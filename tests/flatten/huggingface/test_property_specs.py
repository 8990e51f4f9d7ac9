"""For every class of layer and cache: one spec whatever it holds, and what is rebuilt goes on as the original does."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from transformers import cache_utils
from transformers.cache_utils import DynamicCache

from tests.flatten.huggingface.caches.every_cache import CACHES, LAYERS, WINDOW, layer_of
from yobx_flatten import flattening_list, register_flattening_functions

pytestmark = pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="layer classes of 5.23")

every_layer = pytest.mark.parametrize("name", LAYERS)
every_cache = pytest.mark.parametrize("name", CACHES)

CONTENTS = st.fixed_dictionaries(
    {
        "batch": st.integers(2, 4),
        "length": st.integers(2, WINDOW + 4),
        "dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        "device": st.sampled_from(["cpu", "meta"]),
    }
)


def cache_of(name, layers=2, **contents):
    cache = DynamicCache()
    cache.layers = [layer_of(name, **contents) for _ in range(layers)]
    return cache


def same(a, b):
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else type(a) is type(b) and a == b


@every_layer
@given(contents=CONTENTS, times=st.integers(1, 3))
@settings(max_examples=15)
def test_a_layer_has_one_spec_whatever_it_holds(name, contents, times):
    with register_flattening_functions(patch_transformers=True):
        expected = pytree.tree_structure(cache_of(name, length=3))
        cache = cache_of(name, **contents)
        assert all(pytree.tree_structure(cache) == expected for _ in range(times))
        leaves, spec = pytree.tree_flatten(cache)
        assert pytree.tree_structure(pytree.tree_unflatten(leaves, spec)) == expected


@every_cache
@given(contents=CONTENTS)
@settings(max_examples=10, deadline=None)  # some make a model's configuration first
def test_a_cache_has_one_spec_whatever_it_holds(name, contents):
    expected, cache = CACHES[name](), CACHES[name](**contents)
    with register_flattening_functions(patch_transformers=True):
        assert pytree.tree_structure(cache) == pytree.tree_structure(expected)


@every_layer
@given(length=st.integers(1, WINDOW + 2), chunks=st.lists(st.integers(1, 2), min_size=1, max_size=3))
@settings(max_examples=15)
def test_a_rebuilt_layer_goes_on_step_by_step(name, length, chunks):
    """Rebuilt before each step, as between the calls of a program: after any steps it holds the same, bit by bit."""
    original, rebuilt = cache_of(name, 1, length=length), cache_of(name, 1, length=length)
    fill = LAYERS[name][1]
    with register_flattening_functions(patch_transformers=True):
        for chunk in chunks:
            rebuilt = pytree.tree_unflatten(*pytree.tree_flatten(rebuilt))
            fill(original.layers[0], chunk)
            fill(rebuilt.layers[0], chunk)
        expected, found = pytree.tree_leaves(original), pytree.tree_leaves(rebuilt)
        assert pytree.tree_structure(rebuilt) == pytree.tree_structure(original)
    assert len(found) == len(expected)
    assert all(map(same, found, expected))


STEPS = {
    "MtpCache": lambda cache, x: cache.update(x, x + 1, 1),
    "DFlashCache": lambda cache, x: cache.update(x, x + 1, 1),
    "MiniMaxCache": lambda cache, x: cache.update(x, x + 1, 0),
    "MimiConv1dPaddingCache": lambda cache, x: cache.update(x[:, :, 0].repeat(1, 2, 1), 0),
    "ReformerDynamicCache": lambda cache, x: cache.update(None, x[:, :, 0], 0),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_rebuilt_cache_goes_on_step_by_step(name):
    original = CACHES[name]()
    rebuilt = copy.deepcopy(original)
    with register_flattening_functions(patch_transformers=True):
        for step in range(3):
            rebuilt = pytree.tree_unflatten(*pytree.tree_flatten(rebuilt))
            given_states = torch.full((2, 2, 1, 4), float(step))
            expected, found = (STEPS[name](cache, given_states) for cache in (original, rebuilt))
            for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
                assert same(a, b)
        for a, b in zip(pytree.tree_leaves(rebuilt), pytree.tree_leaves(original), strict=True):
            assert same(a, b)


def test_every_class_of_layer_and_cache_is_listed():
    classes = {type(layer_of(name, 0)) for name in LAYERS} | {type(make()) for make in CACHES.values()}
    listed = {row.cls for row in flattening_list()}
    assert {f"{cls.__module__}.{cls.__qualname__}" for cls in classes} <= listed
