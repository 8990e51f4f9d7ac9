"""Caches and layers without a row come apart by their attributes: those of transformers, of models and of users."""

import collections
import copy
import inspect
import json
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from transformers import LlamaConfig, cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from tests import fresh_process
from tests.flatten.huggingface.caches.cache_cases import same_leaves
from tests.flatten.huggingface.caches.every_cache import (
    CACHES,
    LAYERS,
    WINDOW,
    differences,
    equal,
    filled,
    layer_of,
    states,
)
from yobx_flatten import CacheStructureError, StaticDataError, flattening_list, register_flattening_functions
from yobx_flatten.huggingface.caches import layouts
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
def test_a_layer_comes_back_with_every_attribute_and_stays_as_it_is(name, length):
    layer = layer_of(name, length)
    before = dict(vars(layer))
    leaves, names = flatten_layers([layer], plain=False)
    assert vars(layer).keys() == before.keys()
    assert all(vars(layer)[key] is value for key, value in before.items())
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
    assert all(map(torch.equal, rebuilt.update(*states(1), 0), copy.deepcopy(cache).update(*states(1), 0)))
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


def mixed(name):
    return [layer_of("DynamicLayer"), layer_of(name), layer_of("DynamicSlidingWindowLayer"), layer_of(name)]


@every_layer
def test_the_second_time_gives_what_the_first_gave(name):
    # those of UnlimitedOcr count the tokens behind the prefill, and stand beside none of the others
    kinds = [[layer_of(name), layer_of(name)]] if name.startswith("Unlimited") else [mixed(name), mixed(name)[:2]]
    for layers in kinds:
        leaves, names = flatten_layers(layers, plain=True)
        for _ in range(2):
            found, found_names = flatten_layers(layers, plain=True)
            assert found_names == names
            assert len(found) == len(leaves)
            assert list(map(type, found)) == list(map(type, leaves))
            assert same_leaves(*([x for x in some if isinstance(x, torch.Tensor)] for some in (found, leaves)))
        rebuilt = unflatten_layers(leaves, names)
        assert [differences(a, b) for a, b in zip(rebuilt, layers, strict=True)] == [[]] * len(layers)


class Noted(DynamicLayer):
    def __init__(self):
        super().__init__()
        self.update(torch.ones(2, 2, 3, 4), torch.zeros(2, 2, 3, 4))
        self.mode = "mean"
        self.power = 2
        self.flags = {0: True, 1: False}
        self.sizes = {"height": 2, "width": 5000}
        self.parts = [torch.ones(1), (torch.zeros(1), 3)]
        self.limits = {"lower": 0.0}
        self.groups = [[1, 2], []]
        self.config = LlamaConfig(hidden_size=8, num_attention_heads=2)
        self.seen_tokens = 3


def set_order(layer):
    held = dict(vars(layer))
    vars(layer).clear()
    vars(layer).update(reversed(held.items()))


CHANGES = {
    "another attribute": lambda layer: setattr(layer, "scale", 0.5),
    "an attribute less": lambda layer: delattr(layer, "mode"),
    "the attributes in another order": set_order,
    "another text": lambda layer: setattr(layer, "mode", "max"),
    "another number": lambda layer: setattr(layer, "power", 3),
    "a number of another type": lambda layer: setattr(layer, "power", 2.0),
    "a flag for a number": lambda layer: layer.flags.update({1: 0}),
    "another flag": lambda layer: layer.flags.update({1: True}),
    "keys in another order": lambda layer: setattr(layer, "flags", {1: False, 0: True}),
    "one key more": lambda layer: layer.flags.update({2: True}),
    "a key in the next dict": lambda layer: layer.sizes.update({1: layer.flags.pop(1)}),
    "the keys of two dicts exchanged": lambda layer: vars(layer).update(flags=layer.sizes, sizes=layer.flags),
    "an equal number of another type": lambda layer: layer.sizes.update(width=5000.0),
    "a dict of another class": lambda layer: setattr(layer, "sizes", collections.OrderedDict(layer.sizes)),
    "a longer list": lambda layer: layer.parts.append(None),
    "a tuple for a list": lambda layer: setattr(layer, "parts", tuple(layer.parts)),
    "None for a tensor": lambda layer: setattr(layer, "parts", None),
    "a tensor for a number": lambda layer: setattr(layer, "power", torch.ones(2)),
    "one tensor under two names": lambda layer: setattr(layer, "values", layer.keys),
    "a tensor of another dtype": lambda layer: setattr(layer, "keys", layer.keys.half()),
    "a dtype of its own": lambda layer: setattr(layer, "dtype", torch.float64),
    "the device of no leaf": lambda layer: setattr(layer, "device", torch.device("meta")),
    "no dtype": lambda layer: setattr(layer, "dtype", None),
    "a parameter for a tensor": lambda layer: setattr(layer, "keys", torch.nn.Parameter(layer.keys)),
    "the other zero": lambda layer: layer.limits.update(lower=-0.0),
    "another limit": lambda layer: layer.limits.update(lower=1e-9),
    "a list in a list that grew": lambda layer: layer.groups[1].append(3),
    "a list in a list that was replaced": lambda layer: layer.groups.__setitem__(0, (1, 2)),
    "a flag in a list": lambda layer: layer.groups[0].__setitem__(0, True),
    "a configuration written in place": lambda layer: setattr(layer.config, "hidden_size", 16),
    "another count": lambda layer: setattr(layer, "seen_tokens", 4),
    "a flag for a count": lambda layer: setattr(layer, "seen_tokens", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_changed_is_rebuilt_as_it_is_now(change):
    layer = Noted()
    unflatten_layers(*flatten_layers([layer], plain=True))
    CHANGES[change](layer)
    [rebuilt] = unflatten_layers(*flatten_layers([layer], plain=True))
    assert differences(rebuilt, layer) == []
    assert list(vars(rebuilt)) == list(vars(layer))


@pytest.mark.parametrize("value", [lambda x: x, [].append, object()], ids=["lambda", "method", "object"])
def test_an_attribute_that_cannot_be_stored_is_refused_by_name_also_of_a_known_layer(value):
    layer = Noted()
    flatten_layers([layer], plain=True)
    layer.mode = value
    with pytest.raises(StaticDataError, match=r"'mode' holds[^$]*register_class_flattening"):
        flatten_layers([layer], plain=True)


def test_a_window_is_remembered_on_every_device(monkeypatch):
    layers = [DynamicSlidingWindowLayer(77) for _ in range(2)]
    for layer, device in zip(layers, ("cpu", "meta"), strict=True):
        layer.update(torch.ones(1, 2, 3, 4, device=device), torch.ones(1, 2, 3, 4, device=device))
    for _ in range(2):
        rebuilt = unflatten_layers(*flatten_layers(layers, plain=True))
        assert [layer._sliding_window_tensor.device.type for layer in rebuilt] == ["cpu", "meta"]


@pytest.mark.parametrize("name", ["DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer"])
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("other", [2, 4])
def test_one_layer_that_counted_otherwise_is_found(name, index, other):
    layers = [layer_of(name) for _ in range(3)]
    for _ in range(2):
        flatten_layers(layers, plain=True)
    layers[index].cumulative_length = other
    with pytest.raises(CacheStructureError, match="have seen different numbers of tokens"):
        flatten_layers(layers, plain=True)


def test_a_window_without_its_tensor_hides_no_other():
    layers = [DynamicSlidingWindowLayer(79) for _ in range(3)]
    for layer in layers:
        layer.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    tensor = layers[0]._sliding_window_tensor
    for layer in layers:
        layer._sliding_window_tensor = None
    flatten_layers(layers, plain=True)
    layers[1]._sliding_window_tensor = tensor
    rebuilt = unflatten_layers(*flatten_layers(layers, plain=True))
    assert [layer._sliding_window_tensor is tensor for layer in rebuilt] == [True] * 3


@pytest.mark.parametrize("placeholder", [None, 3, 2.5, "leaf", object()], ids=lambda value: type(value).__name__)
@every_layer
def test_a_placeholder_for_one_leaf_or_for_all_keeps_its_place(name, placeholder):
    leaves, names = flatten_layers([layer_of(name), layer_of(name)], plain=True)
    filled = unflatten_layers([placeholder] * len(leaves), names)
    assert flatten_layers(filled, plain=True) == ([placeholder] * len(leaves), names)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        changed = [*leaves[:index], placeholder, *leaves[index + 1 :]]
        found, found_names = flatten_layers(unflatten_layers(changed, names), plain=True)
        assert found_names == names
        assert all(a is b or a == b for a, b in zip(found, changed, strict=True) if not isinstance(b, torch.Tensor))
        assert all(a is b for a, b in zip(found, changed, strict=True) if isinstance(b, torch.Tensor))


def test_layers_in_no_order_come_back_in_it():
    sliding, linear = "DynamicSlidingWindowLayer", "LinearAttentionLayer"
    kinds = [sliding, "DynamicLayer", linear, sliding, "DynamicLayer", linear, sliding]
    layers = [layer_of(name, length) for name, length in zip(kinds, (3, 3, 3, 0, 3, 0, 3), strict=True)]
    for _ in range(2):
        rebuilt = unflatten_layers(*flatten_layers(layers, plain=True))
        assert [differences(a, b) for a, b in zip(rebuilt, layers, strict=True)] == [[]] * len(layers)


def test_names_that_somebody_changes_are_her_own():
    layers = [layer_of("StaticLayer"), layer_of("DynamicSlidingWindowLayer")]
    leaves, names = flatten_layers(layers, plain=True)
    expected = list(names)
    unflatten_layers(leaves, names)
    names[:] = ["key_D_0", "value_D_0"]
    [full] = unflatten_layers(leaves[:2], names)
    assert type(full) is DynamicLayer
    assert flatten_layers(layers, plain=True)[1] == expected
    assert list(map(type, unflatten_layers(leaves, expected))) == list(map(type, layers))


def test_plans_of_many_layouts_are_found_from_many_threads():
    caches = [[layer_of("DynamicLayer") for _ in range(count)] for count in range(1, 25)]
    flat = [flatten_layers(layers, plain=True) for layers in caches]

    def wrong(_):
        for _ in range(20):
            for count, (leaves, names) in enumerate(flat, start=1):
                layers = unflatten_layers(leaves, names)
                if [layer.keys is leaf for layer, leaf in zip(layers, leaves[::2], strict=True)] != [True] * count:
                    return count
        return None

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(wrong, range(2))) == [None, None]
    assert len(layouts._RECENT) <= 8


every_cache = pytest.mark.parametrize("name", CACHES)


@pytest.fixture
def cache(name):
    """Made before the block is entered: models import other models."""
    return CACHES[name]()


@every_cache
def test_a_cache_comes_back_with_every_attribute(name, cache):
    with register_flattening_functions(patch_transformers=True):
        paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(cache)[0]]
        leaves, spec = pytree.tree_flatten(cache)
        stored = pytree.treespec_loads(pytree.treespec_dumps(spec))
        rebuilt = pytree.tree_unflatten(leaves, stored)
    assert stored == spec
    assert leaves
    assert len(set(paths)) == len(leaves)
    assert all(isinstance(leaf, (torch.Tensor, int)) for leaf in leaves)
    assert type(rebuilt) is type(cache)
    ignored = {"layer_class_to_replicate", "offloading"}
    left, right = ({k: v for k, v in vars(x).items() if k not in ignored} for x in (rebuilt, cache))
    assert left.keys() == right.keys()
    assert [key for key in right if not equal(left[key], right[key])] == []


@every_cache
@pytest.mark.parametrize("placeholder", ["leaf", 7, object()], ids=["text", "number", "object"])
def test_a_cache_may_hold_anything_for_a_while(name, cache, placeholder):
    """torch puts names and numbers in place of leaves, and takes the cache apart again."""
    with register_flattening_functions(patch_transformers=True):
        leaves, spec = pytree.tree_flatten(cache)
        again = pytree.tree_flatten(pytree.tree_unflatten([placeholder] * len(leaves), spec))
    assert again == ([placeholder] * len(leaves), spec)


class ScaledLayer(DynamicLayer):
    def __init__(self):
        super().__init__()
        self.scale, self.power = torch.ones(4), 2


class NotedCache(DynamicCache):
    def __init__(self):
        super().__init__()
        self.scores, self.mode = torch.zeros(3), ("mean", 1)


def test_a_users_layer_and_cache_come_back_with_layers_of_other_kinds():
    cache = NotedCache()
    cache.layers = [DynamicLayer(), ScaledLayer()]
    filled(cache)
    cache.layers.append(layer_of("LinearAttentionLayer"))
    with register_flattening_functions(patch_transformers=True):
        named, spec = pytree.tree_flatten_with_path(cache)
        rebuilt = pytree.tree_unflatten([leaf for _, leaf in named], pytree.treespec_loads(pytree.treespec_dumps(spec)))
    assert [pytree.keystr(path) for path, _ in named] == [
        *("['key_D_0']", "['value_D_0']", "['key_ScaledLayer_1']", "['value_ScaledLayer_1']"),
        *("['scale_ScaledLayer_1']", "['conv_states.0_L_2']", "['recurrent_states.0_L_2']", "['scores']"),
    ]
    assert (type(rebuilt), type(rebuilt.layers[1])) == (NotedCache, ScaledLayer)
    assert rebuilt.scores is cache.scores
    assert rebuilt.mode == ("mean", 1)
    assert [differences(a, b) for a, b in zip(rebuilt.layers, cache.layers, strict=True)] == [[], [], []]


def test_an_attribute_of_a_cache_that_cannot_be_stored_is_named():
    cache = filled(NotedCache())
    cache.callback = lambda: 1
    named = pytest.raises(StaticDataError, match="'callback' holds")
    with register_flattening_functions(patch_transformers=True), named:
        pytree.tree_flatten(cache)


def test_a_cache_that_the_user_registered_with_torch_keeps_hers(monkeypatch):
    hers = pytree.NodeDef(NotedCache, lambda one: ([one.scores], None), lambda leaves, _: NotedCache(), None)
    monkeypatch.setitem(pytree.SUPPORTED_NODES, NotedCache, hers)
    with register_flattening_functions(patch_transformers=True) as undo:
        assert pytree.SUPPORTED_NODES[NotedCache] is hers
        assert len(pytree.tree_leaves(NotedCache())) == 1
    assert NotedCache not in undo
    assert pytree.SUPPORTED_NODES[NotedCache] is hers


IMPORTED_INSIDE = """
import warnings
warnings.simplefilter("error")
import torch.utils._pytree as pytree
import transformers
from yobx_flatten import register_flattening_functions

with register_flattening_functions(patch_transformers=True) as undo:
    from transformers.models.mimi.modeling_mimi import MimiConv1dPaddingCache
    assert undo[MimiConv1dPaddingCache] is True
    cache = MimiConv1dPaddingCache(1, [2], ["constant"], [4])
    _, spec = pytree.tree_flatten(cache)
    assert type(pytree.tree_unflatten([], spec)) is MimiConv1dPaddingCache
assert MimiConv1dPaddingCache not in pytree.SUPPORTED_NODES
with register_flattening_functions(patch_transformers=True) as undo:
    assert undo[MimiConv1dPaddingCache] is True
assert MimiConv1dPaddingCache not in pytree.SUPPORTED_NODES
assert not [name for name in map(str, pytree._cxx_pytree_pending_imports) if "Mimi" in name]
"""


def test_a_model_imported_inside_the_block_is_known_and_gone_afterwards():
    fresh_process.run("-c", IMPORTED_INSIDE)


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


@pytest.mark.parametrize("name", [*LAYERS, *CACHES])
@given(contents=CONTENTS, times=st.integers(1, 3))
@settings(max_examples=15, deadline=None)  # some make a model's configuration first
def test_a_layer_or_cache_has_one_spec_whatever_it_holds(name, contents, times):
    expected_of, cache = (
        (CACHES[name](), CACHES[name](**contents)) if name in CACHES else (cache_of(name), cache_of(name, **contents))
    )
    with register_flattening_functions(patch_transformers=True):
        expected = pytree.tree_structure(expected_of)
        assert all(pytree.tree_structure(cache) == expected for _ in range(times))
        leaves, spec = pytree.tree_flatten(cache)
        assert pytree.tree_structure(pytree.tree_unflatten(leaves, spec)) == expected


@every_layer
@given(length=st.integers(0, WINDOW + 2), chunks=st.lists(st.integers(1, 2), min_size=1, max_size=3))
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
    "MiniMaxCache": lambda cache, x: (cache.update(x, x + 1, 0), cache.get_linear_cache(2), torch.tensor(len(cache))),
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
    assert {f"{cls.__module__}.{cls.__qualname__}" for cls in classes} <= {row.cls for row in flattening_list()}
