"""The tensor that transformers keeps beside a sliding window is there after unflatten, and in no program."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from yobx_flatten import register_flattening_functions
from yobx_flatten.huggingface.caches.functions import flatten_dynamic_cache, unflatten_dynamic_cache

HAS_WINDOW_TENSOR = "_sliding_window_tensor" in vars(DynamicSlidingWindowLayer(8))
pytestmark = pytest.mark.skipif(not HAS_WINDOW_TENSOR, reason="transformers < 5.0 keeps no tensor beside a window")


def states():
    return torch.ones(2, 2, 3, 4), torch.ones(2, 2, 3, 4)


def fresh(window):
    """What a process holds that loaded a program: names and leaves, and has seen no layer of this window."""
    return [*states(), 3], [f"key_W{window}_0", f"value_W{window}_0", "length"]


def windows(cache):
    return [None if window is None else window.item() for _, _, window in cache]


def test_a_window_that_nobody_has_seen_is_among_what_a_cache_gathers():
    """DDP gathers a cache by its items and makes another of them: of sliding layers, not of full ones."""
    cache = unflatten_dynamic_cache(*fresh(1009))
    assert windows(cache) == [1009]
    own = DynamicCache()
    own.layers = [DynamicSlidingWindowLayer(1009)]
    own.update(*states(), 0)
    try:
        DynamicCache(list(own))
    except IndexError:
        pytest.skip("5.0 gathers no sliding layers, its own neither: it takes the first item of a tensor without axes")
    gathered = DynamicCache(list(cache))
    assert [(type(layer), layer.sliding_window) for layer in gathered.layers] == [(DynamicSlidingWindowLayer, 1009)]


def test_one_tensor_serves_all_layers_of_a_window():
    """As many tensors are made as there are windows and devices."""
    leaves = [*states(), *states()]
    names = [f"{part}_W1013_{layer}" for layer in range(2) for part in ("key", "value")]
    for _ in range(2):
        layers = unflatten_dynamic_cache([*leaves, 3], [*names, "length"]).layers
    assert layers[0]._sliding_window_tensor is layers[1]._sliding_window_tensor
    on_meta = unflatten_dynamic_cache([leaf.to("meta") for leaf in leaves] + [3], [*names, "length"]).layers
    assert on_meta[0]._sliding_window_tensor.device.type == "meta"


def test_a_tensor_made_in_inference_mode_is_an_ordinary_one():
    """It is kept for later, where an inference tensor would be refused by autograd."""
    with torch.inference_mode():
        cache = unflatten_dynamic_cache(*fresh(1019))
    assert not cache.layers[0]._sliding_window_tensor.is_inference()


class MakesItsCache(torch.nn.Module):
    def forward(self, x):
        cache = DynamicCache()
        cache.layers = [DynamicSlidingWindowLayer(1021)]
        cache.update(x, x, 0)
        return cache


class TakesACache(torch.nn.Module):
    def forward(self, x, cache):
        cache.update(x, x, 0)
        return cache


def test_a_cache_that_a_program_makes_has_the_tensor_and_the_program_has_none():
    """Made by unflatten when the program is called; in the trace it would become a constant."""
    with register_flattening_functions(patch_transformers=True):
        program = torch.export.export(MakesItsCache(), (torch.ones(2, 2, 3, 4),))
        cache = program.module()(torch.ones(2, 2, 3, 4))
    assert windows(cache) == [1021]
    assert not program.constants


def test_a_cache_that_is_put_together_in_a_trace_leaves_no_constant():
    """The example's layer is the only one of its window that had a tensor, and it was never taken apart before."""
    names = fresh(1031)[1]
    example = unflatten_dynamic_cache([*states(), 3], names)
    with register_flattening_functions(patch_transformers=True):
        program = torch.export.export(TakesACache(), (torch.ones(2, 2, 3, 4), example))
        cache = program.module()(torch.ones(2, 2, 3, 4), example)
    assert not program.constants
    assert windows(cache) == [1031]


@pytest.mark.parametrize("around", [FakeTensorMode, torch.func.vmap], ids=["fake", "vmap"])
def test_nothing_is_made_where_it_would_not_be_a_tensor_of_its_own(around):
    """Among fake tensors and in a transformation the attribute is left out; the next cache outside has it."""
    window = 1033 if around is FakeTensorMode else 1039
    leaves, names = fresh(window)
    seen = []

    def rebuild(keys):
        cache = unflatten_dynamic_cache([keys, keys, 3], names)
        seen.append(hasattr(cache.layers[0], "_sliding_window_tensor"))
        return flatten_dynamic_cache(cache)[0][0]

    if around is FakeTensorMode:
        with FakeTensorMode() as mode:
            rebuild(mode.from_tensor(leaves[0]))
    else:
        torch.func.vmap(rebuild)(leaves[0])
    assert seen == [False]
    assert windows(unflatten_dynamic_cache(leaves, names)) == [window]
