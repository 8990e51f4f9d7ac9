"""A spec states what the configuration fixes and nothing about the data; storage and traced programs keep the spec."""

import copy
import functools
import operator
import pickle

import pytest
import torch
import torch.fx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import cache_utils
from transformers.cache_utils import EncoderDecoderCache

from tests.flatten.huggingface.caches.cache_cases import (
    LAYOUTS,
    PAST,
    cache_differences,
    made,
    names_of,
    real_caches,
    same_leaves,
    states,
)
from tests.models import WINDOW, start
from yobx_flatten import register_flattening_functions
from yobx_flatten.errors import SpecMismatchError
from yobx_flatten.huggingface.builders import make_dynamic_cache, make_encoder_decoder_cache, make_static_cache
from yobx_flatten.huggingface.caches.functions import flatten_with_keys_dynamic_cache


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from(LAYOUTS))
def test_a_spec_says_nothing_about_the_data(data, layout):
    """Other batch sizes, lengths, dtypes, devices and numbers of tokens: the same spec, so one program serves all."""
    # 0 and 1 tokens included; static caches have room for 16, and encoder-decoder ones ask a tensor for its value
    one = functools.partial(
        st.fixed_dictionaries,
        {
            "length": st.integers(0, 16),
            "batch": st.integers(1, 3),  # transformers takes a cache of no rows for an empty one
            "dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
            "device": st.sampled_from(["cpu", "cpu" if layout == "SS|S" else "meta"]),
        },
    )
    first, second = (made(layout, **data.draw(one())) for _ in range(2))
    with register_flattening_functions(patch_transformers=True):
        assert pytree.tree_structure(first) == pytree.tree_structure(second)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mistral", "t5", "bart"])
def test_real_caches_of_one_model_have_one_spec(block, name, static):
    cases = [(2, 2), (1, WINDOW - 1), (3, WINDOW), (2, PAST)]
    specs = [pytree.tree_structure(start(name, static=static, batch=batch, past=past).cache) for batch, past in cases]
    assert all(spec == specs[0] for spec in specs)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own copying of leaf specs warns
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_spec_survives_storage(block, layout):
    """In JSON as `torch.export.save` writes it, and by pickle and deepcopy."""
    cache = made(layout)
    leaves, spec = pytree.tree_flatten(cache)
    stored = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert stored == spec
    assert copy.deepcopy(spec) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert cache_differences(pytree.tree_unflatten(leaves, stored), cache) == []


def test_layouts_have_different_specs(block):
    caches = [made(layout) for layout in LAYOUTS]
    caches.append(make_dynamic_cache([states()], "DynamicSlidingWindowLayer", {"sliding_window": 5}))
    caches.append(make_dynamic_cache([states()], "DynamicSlidingWindowLayer", {"sliding_window": 6}))
    caches.append(make_static_cache([states()], 17))
    specs = [pytree.tree_structure(cache) for cache in caches]
    assert [specs.index(spec) for spec in specs] == list(range(len(specs)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_keyed_flatten_agrees_with_the_plain_one(block, layout):
    cache = made(layout, length=12)
    leaves, spec = pytree.tree_flatten(cache)
    keyed, keyed_spec = pytree.tree_flatten_with_path(cache)
    assert keyed_spec == spec
    assert same_leaves([leaf for _, leaf in keyed], leaves)
    assert len({pytree.keystr(path) for path, _ in keyed}) == len(leaves)


def test_a_key_path_is_the_name_of_the_leaf(block):
    cache = made("WDW")
    cache.layers[0] = cache_utils.DynamicSlidingWindowLayer(WINDOW)
    both = make_encoder_decoder_cache(cache, made("D"))
    found = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(both)[0]]
    assert found == [
        *("['self_attention_cache']['key_D_1']", "['self_attention_cache']['value_D_1']"),
        *("['self_attention_cache']['key_W8_2']", "['self_attention_cache']['value_W8_2']"),
        *("['cross_attention_cache']['key_0']", "['cross_attention_cache']['value_0']"),
    ]
    assert [str(key) for key, _ in flatten_with_keys_dynamic_cache(made("D"))[0]] == ["['key_0']", "['value_0']"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cpp_pytree_sees_the_same_leaves(block, layout):
    """`torch.compile` takes inputs apart with it."""
    pytest.importorskip("optree")
    cxx = pytest.importorskip("torch.utils._cxx_pytree")
    cache = made(layout, length=12)
    leaves = pytree.tree_leaves(cache)
    found, spec = cxx.tree_flatten(cache)
    assert same_leaves(found, leaves)
    assert cache_differences(cxx.tree_unflatten(found, spec), cache) == []


def traced_sum(cache):

    def total(cache):
        return functools.reduce(operator.add, [layer.keys + layer.values for layer in cache.layers])

    holders = pytree.tree_map(lambda leaf: torch.fx.PH, cache)
    return torch.fx.symbolic_trace(total, concrete_args={"cache": holders})


def test_a_traced_program_takes_caches_of_its_structure(block):
    program = traced_sum(made("DD"))
    assert torch.equal(program(made("DD", length=5, batch=3)), torch.full((3, 2, 5, 4), 4.0))


@pytest.mark.parametrize(("traced", "called"), [("DD", "DW"), ("DW", "WD"), ("DW", "DD"), ("DD", "DDD")])
def test_a_traced_program_refuses_another_structure(block, traced, called):
    """Its leaves would be taken in the wrong order, without a word. The error names both structures."""
    program = traced_sum(made(traced))
    with pytest.raises(SpecMismatchError) as caught:
        program(made(called))
    assert str(names_of(made(traced))) in str(caught.value)
    assert str(names_of(made(called))) in str(caught.value)


def test_a_traced_program_refuses_another_class(block):
    program = traced_sum(made("DD"))
    with pytest.raises(SpecMismatchError, match=r"(?s)DynamicCache.*StaticCache"):
        program(made("SS"))


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Records every torch function, except the questions what a tensor is."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") not in {"__get__", "dim"}:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@real_caches
def test_flatten_and_unflatten_make_no_tensor(block, monkeypatch, name, static, past):
    """A tensor made there becomes a constant of an exported program; `update` copies all there is."""
    cache = start(name, static=static, past=past).cache
    pytree.tree_flatten(cache)  # a class is read once, its `update` too
    owners = [cache_utils.Cache, EncoderDecoderCache]
    owners += {type(layer) for layer in getattr(cache, "layers", ())}
    for owner in owners:
        if "update" in vars(owner):
            monkeypatch.setattr(owner, "update", None)
    with Operations() as operations, Calls() as calls:
        leaves, spec = pytree.tree_flatten(cache)
        keyed, _ = pytree.tree_flatten_with_path(cache)
        rebuilt = pytree.tree_unflatten(leaves, spec)
        again, _ = pytree.tree_flatten(rebuilt)
    # a cache that ends in its length: one number is written at each flattening, of which torch does two for paths
    counted = isinstance(spec.context, list) and spec.context[-1] == "length"
    allowed = {"aten.full.default", "aten._local_scalar_dense.default"} if counted else set()
    assert set(operations.found) <= allowed
    assert operations.found.count("aten.full.default") == 4 * counted
    assert counted or not calls.found
    assert same_leaves(again, leaves)
    assert same_leaves([leaf for _, leaf in keyed], leaves)
