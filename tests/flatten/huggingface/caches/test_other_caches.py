"""Every other cache: subclasses of `Cache`, models' own, those that do not inherit it, and the user's."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer

from tests import fresh_process
from tests.flatten.huggingface.caches.every_cache import (
    CACHES,
    LAYERS,
    WINDOW,
    equal,
    filled,
    layer_of,
    minimax,
    states,
)
from yobx_flatten import flattening_list, register_flattening_functions
from yobx_flatten.errors import StaticDataError

pytestmark = pytest.mark.skipif(not hasattr(cache_utils, "KVSharingDict"), reason="cache classes of 5.23")


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


# -- the user's own


class ScaledLayer(DynamicLayer):
    def __init__(self):
        super().__init__()
        self.scale, self.power = torch.ones(4), 2


class NotedCache(DynamicCache):
    def __init__(self):
        super().__init__()
        self.scores, self.mode = torch.zeros(3), ("mean", 1)


def test_a_users_layer_and_cache_come_back():
    cache = NotedCache()
    cache.layers = [DynamicLayer(), ScaledLayer()]
    filled(cache)
    with register_flattening_functions(patch_transformers=True):
        named, spec = pytree.tree_flatten_with_path(cache)
        rebuilt = pytree.tree_unflatten([leaf for _, leaf in named], pytree.treespec_loads(pytree.treespec_dumps(spec)))
    assert [pytree.keystr(path) for path, _ in named] == [
        "['key_D_0']",
        "['value_D_0']",
        "['key_ScaledLayer_1']",
        "['value_ScaledLayer_1']",
        "['scale_ScaledLayer_1']",
        "['scores']",
    ]
    assert (type(rebuilt), type(rebuilt.layers[1])) == (NotedCache, ScaledLayer)
    assert rebuilt.scores is cache.scores
    assert rebuilt.mode == ("mean", 1)
    assert equal(vars(rebuilt.layers[1]), vars(cache.layers[1]))


def test_an_attribute_of_a_cache_that_cannot_be_stored_is_named():
    cache = filled(NotedCache())
    cache.callback = lambda: 1
    with (
        register_flattening_functions(patch_transformers=True),
        pytest.raises(StaticDataError, match="'callback' holds"),
    ):
        pytree.tree_flatten(cache)


def test_a_cache_that_the_user_registered_with_torch_keeps_hers(monkeypatch):
    hers = pytree.NodeDef(NotedCache, lambda one: ([one.scores], None), lambda leaves, _: NotedCache(), None)
    monkeypatch.setitem(pytree.SUPPORTED_NODES, NotedCache, hers)
    with register_flattening_functions(patch_transformers=True) as undo:
        assert pytree.SUPPORTED_NODES[NotedCache] is hers
        assert len(pytree.tree_leaves(NotedCache())) == 1
    assert NotedCache not in undo
    assert pytree.SUPPORTED_NODES[NotedCache] is hers


def test_a_cache_goes_on_where_the_original_would():
    cache = minimax()
    with register_flattening_functions(patch_transformers=True):
        rebuilt = pytree.tree_unflatten(*pytree.tree_flatten(copy.deepcopy(cache)))
    for expected, found in zip(cache.update(*states(1), 0), rebuilt.update(*states(1), 0), strict=True):
        assert torch.equal(expected, found)
    assert torch.equal(rebuilt.get_linear_cache(2), cache.get_linear_cache(2))
    assert len(rebuilt) == len(cache) == 3


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


every_layer = pytest.mark.parametrize("name", LAYERS)

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
