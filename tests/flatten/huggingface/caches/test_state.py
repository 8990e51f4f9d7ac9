"""Layers without a row come apart by their attributes: every class of transformers and of models, whatever it holds."""

import copy
import inspect
import json
import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from transformers import LlamaConfig, cache_utils
from transformers.cache_utils import DynamicCache

from tests.flatten.huggingface.caches.every_cache import LAYERS, differences, equal, layer_of, states
from yobx_flatten import register_flattening_functions
from yobx_flatten.errors import StaticDataError
from yobx_flatten.huggingface.caches.layers import LETTERS, OTHER_LETTERS
from yobx_flatten.huggingface.caches.layouts import flatten_layers, unflatten_layers
from yobx_flatten.huggingface.caches.state import StateBuilder, leaf_paths, read_state

pytestmark = pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="layer classes of 5.23")

NEEDS_ANOTHER_LIBRARY = {"QuantoQuantizedLayer", "HQQQuantizedLayer"}  # optimum-quanto, hqq
every_layer = pytest.mark.parametrize("name", LAYERS)


def test_every_class_of_layer_is_in_the_table_above():
    """A class that a new version of transformers brings is noticed here."""
    abstract = {"CacheLayerMixin", "LinearAttentionCacheLayerMixin", "BaseQuantizedLayer", "QuantizedLayer"}
    found = {
        name
        for name, cls in vars(cache_utils).items()
        if isinstance(cls, type) and cls.__module__ == cache_utils.__name__ and name.endswith(("Layer", "Mixin"))
    }
    assert found - abstract - NEEDS_ANOTHER_LIBRARY <= set(LAYERS)
    assert found - abstract == (set(LETTERS) - {"SlidingWindowLayer"}) | set(OTHER_LETTERS)


def stated(layer):
    cls = type(layer)
    names = [name for name in dir(cls) if not name.startswith("_")]
    kinds = {name: inspect.getattr_static(cls, name) for name in names}
    return {name: getattr(layer, name) for name, kind in kinds.items() if isinstance(kind, (property, bool, int))}


@every_layer
@pytest.mark.parametrize("length", [0, 3, 12], ids=["empty", "filled", "past the window"])
def test_a_layer_comes_back_with_every_attribute(name, length):
    layer = layer_of(name, length)
    leaves, names = flatten_layers([layer], plain=False)
    [rebuilt] = unflatten_layers(leaves, json.loads(json.dumps(names)))
    assert type(rebuilt) is type(layer)
    # a layer with a row that holds nothing is made anew, with a counter of its own
    made_anew = [] if length or name not in LETTERS or not hasattr(layer, "max_cache_len") else ["cumulative_length"]
    assert differences(rebuilt, layer) == made_anew
    assert equal(stated(rebuilt), stated(layer))


@pytest.mark.parametrize("room", [4, 8, 20])
def test_room_and_window_decide_whether_a_layer_can_go_back(room):
    """`is_croppable` is what transformers states, for room below the window, as large, and above."""
    layer = cache_utils.StaticSlidingWindowLayer(max_cache_len=room, sliding_window=8)
    is_croppable = layer.is_croppable
    layer.update(*states(3))
    [rebuilt] = unflatten_layers(*flatten_layers([layer], plain=False))
    assert rebuilt.is_croppable == is_croppable
    assert differences(rebuilt, layer) == []


@every_layer
def test_an_empty_layer_that_was_rebuilt_can_be_filled(name):
    """A program for the prefill hands it on."""
    [rebuilt] = unflatten_layers(*flatten_layers([layer_of(name, 0)], plain=False))
    LAYERS[name][1](rebuilt, 3)
    expected = flatten_layers([layer_of(name, 3)], plain=False)
    found = flatten_layers([rebuilt], plain=False)
    assert found[1] == expected[1]
    for a, b in zip(found[0], expected[0], strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@every_layer
@given(
    batch=st.integers(2, 4),
    length=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    device=st.sampled_from(["cpu", "meta"]),
)
@settings(max_examples=12)
def test_the_names_do_not_depend_on_what_a_layer_holds(name, batch, length, dtype, device):
    _, names = flatten_layers([layer_of(name, length, batch=batch, dtype=dtype, device=device)], plain=False)
    assert names == flatten_layers([layer_of(name, 3)], plain=False)[1]


@every_layer
@pytest.mark.parametrize("placeholder", ["leaf", None, 7, object()], ids=["text", "None", "number", "object"])
def test_a_layer_may_hold_anything_for_a_while(name, placeholder):
    leaves, names = flatten_layers([layer_of(name)], plain=False)
    filled = unflatten_layers([placeholder] * len(leaves), names)
    again, names_again = flatten_layers(filled, plain=False)
    assert (again, names_again) == ([placeholder] * len(leaves), names)


@every_layer
def test_flatten_does_not_change_a_layer(name):
    layer = layer_of(name)
    before = dict(vars(layer))
    flatten_layers([layer], plain=False)
    assert vars(layer).keys() == before.keys()
    assert all(vars(layer)[key] is value for key, value in before.items())


def test_layers_of_all_kinds_stand_in_one_cache():
    cache = DynamicCache()
    cache.layers = [layer_of(name) for name in ("DynamicLayer", "LinearAttentionLayer", "DynamicSlidingWindowLayer")]
    with register_flattening_functions(patch_transformers=True):
        named, spec = pytree.tree_flatten_with_path(cache)
        rebuilt = pytree.tree_unflatten([leaf for _, leaf in named], pytree.treespec_loads(pytree.treespec_dumps(spec)))
    assert [pytree.keystr(path) for path, _ in named] == [
        "['key_D_0']",
        "['value_D_0']",
        "['conv_states.0_L_1']",
        "['recurrent_states.0_L_1']",
        "['key_W8_2']",
        "['value_W8_2']",
    ]
    assert [differences(a, b) for a, b in zip(rebuilt.layers, cache.layers, strict=True)] == [[], [], []]


def test_a_quantised_cache_comes_back():
    config = LlamaConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2)
    cache = cache_utils.QuantizedCache("fp8", config)
    for position in range(2):
        cache.update(*states(3), position)
        cache.update(*states(2), position)
    with register_flattening_functions(patch_transformers=True):
        leaves, spec = pytree.tree_flatten(cache)
        rebuilt = pytree.tree_unflatten(leaves, spec)
    assert type(rebuilt) is cache_utils.QuantizedCache
    assert [differences(a, b) for a, b in zip(rebuilt.layers, cache.layers, strict=True)] == [[], []]
    assert sum(leaf.dtype is torch.float8_e4m3fn for leaf in leaves if isinstance(leaf, torch.Tensor)) == 4
    expected = copy.deepcopy(cache).update(*states(1), 0)
    assert all(map(torch.equal, rebuilt.update(*states(1), 0), expected))
    assert rebuilt.get_seq_length() == 6


def test_what_quanto_quantises_with_comes_back(monkeypatch):
    """Its layers hold an object without attributes, which no other static data is."""
    module = types.ModuleType("optimum.quanto.tensor.optimizers")
    module.MaxOptimizer = type("MaxOptimizer", (), {"__module__": module.__name__})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    template, leaves = read_state({"optimizer": module.MaxOptimizer(), "scale": torch.ones(2)})
    held, _, _ = StateBuilder(json.loads(json.dumps(template))).build(iter(leaves), 0)
    assert type(held["optimizer"]) is module.MaxOptimizer
    assert [leaf is held["scale"] for leaf in leaves] == [True]


def test_one_tensor_under_two_names_is_one_leaf():
    layer = layer_of("DeepseekV4HCACache")
    assert layer.keys is layer.values
    leaves, names = flatten_layers([layer], plain=False)
    [rebuilt] = unflatten_layers([leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], names)
    assert rebuilt.keys is rebuilt.values
    assert sum(name.startswith(("key_", "value_")) for name in names) == 1


# -- templates


def test_each_attribute_has_its_place_in_the_template():
    held = {
        "keys": torch.ones(2, 3, 4),
        "seen_tokens": 5,
        "max_cache_len": 16,
        "dtype": torch.float32,
        "batch_size": 2,
        "parts": {"a": [torch.ones(1)], "b": ()},
        "mode": "mean",
    }
    template, leaves = read_state(held)
    assert template == {
        "keys": ["tensor"],
        "seen_tokens": ["number"],
        "max_cache_len": ["fixed", 16],
        "dtype": ["dtype", 0],
        "batch_size": ["shape", 0, 0],
        "parts": ["dict", [["a", ["list", [["tensor"]]]], ["b", ["fixed", {"!tuple": []}]]]],
        "mode": ["fixed", "mean"],
    }
    assert leaf_paths(template) == ["keys", "seen_tokens", "parts.a.0"]
    rebuilt, used, real = StateBuilder(json.loads(json.dumps(template))).build(iter(leaves), 0)
    assert (used, real) == (leaves, True)
    assert list(rebuilt) == list(held)
    assert equal(rebuilt, held)


@pytest.mark.parametrize("value", [lambda x: x, [].append, object()], ids=["lambda", "method", "object"])
def test_an_attribute_that_cannot_be_stored_is_named(value):
    with pytest.raises(StaticDataError, match=r"'activation' holds[^$]*register_class_flattening"):
        read_state({"keys": torch.ones(2), "activation": value})
