"""What cannot be flattened without loss is refused, also names from a file; any objects may replace leaves."""

import copy
import json
import pathlib

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers import cache_utils

from tests.flatten.huggingface.caches.cache_cases import HAS_FLAG, LAYOUTS, cache_differences, made, round_trip
from tests.models import WINDOW
from yobx_flatten import FlattenError, register_flattening_functions
from yobx_flatten.errors import CacheStructureError, SpecMismatchError, UnsupportedLayerError
from yobx_flatten.huggingface.caches.functions import (
    flatten_dynamic_cache,
    flatten_static_cache,
    unflatten_dynamic_cache,
)
from yobx_flatten.huggingface.caches.known_state import read_template
from yobx_flatten.huggingface.caches.layers import kind_of, kind_of_code
from yobx_flatten.huggingface.caches.layouts import flatten_layers, unflatten_layers


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


@pytest.mark.parametrize(("layers", "changed"), [("WWW", [2]), ("DWW", [1, 2])])
def test_sliding_layers_that_disagree_with_others_are_named(layers, changed):
    """One count serves the cache, and a full layer holds every token."""
    cache = made(layers)
    for index in changed:
        cache.layers[index].cumulative_length = 9
    with pytest.raises(CacheStructureError, match=rf"3 and, in layers\[{changed[0]}\] \(W8\), 9"):
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
    assert kind_of(type("DynamicLayer", (cache_utils.DynamicLayer,), {"__module__": "elsewhere"})) is None


@pytest.mark.parametrize("code", ["Q8", "", "w8", "W", "S", "Wr", "W8x", "X-1", "D8"])
def test_an_unknown_code_is_refused(code):
    with pytest.raises(UnsupportedLayerError, match="names no kind of cache layer"):
        kind_of_code(code)


PLACEHOLDERS = [None, "leaf", 7, 0, object(), torch.Size([2, 3]), torch.float32]


@pytest.mark.parametrize("placeholder", PLACEHOLDERS, ids=lambda p: type(p).__name__ if p != 0 else "zero")
@pytest.mark.parametrize("layout", [*LAYOUTS, "DDx", "XSx"])
def test_a_cache_may_hold_anything_for_a_while(block, layout, placeholder):
    """torch fills trees with names, numbers, shapes and `None`; what was filled in comes out again in its place."""
    cache = made(layout.rstrip("x"))
    if layout.endswith("x"):
        cache.layers[0] = type(cache.layers[0])(*[WINDOW, WINDOW][: 2 if layout[0] == "X" else 0])
    leaves, spec = pytree.tree_flatten(cache)
    filled = pytree.tree_unflatten([placeholder] * len(leaves), spec)
    found, found_spec = pytree.tree_flatten(filled, is_leaf=lambda node: node is placeholder)
    assert found_spec == spec
    assert all(leaf is placeholder for leaf in found)
    _, keyed_spec = pytree.tree_flatten_with_path(filled, is_leaf=lambda node: node is placeholder)
    assert keyed_spec == spec
    mapped = pytree.tree_map(lambda leaf: placeholder, cache)
    assert pytree.tree_structure(mapped, is_leaf=lambda node: node is placeholder) == spec
    assert cache_differences(pytree.tree_unflatten(leaves, found_spec), cache) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_leaf_alone_may_be_none(block, layout):
    """The gradients of a cache, say: some leaves have one, others have none."""
    leaves, spec = pytree.tree_flatten(made(layout))
    for index in range(len(leaves)):
        holes = [None if i == index else leaf for i, leaf in enumerate(leaves)]
        filled = pytree.tree_unflatten(holes, spec)
        assert pytree.tree_flatten(filled) == (holes, spec)


@pytest.mark.parametrize("layout", ["DD", "DW", "WW", "SX"])
def test_tensors_of_any_shape_may_be_filled_in(block, layout):
    cache = made(layout, length=12)
    spec = pytree.tree_structure(cache)
    for change in (torch.Tensor.sum, torch.Tensor.flatten, torch.Tensor.unsqueeze_):
        arguments = (0,) if change is torch.Tensor.unsqueeze_ else ()
        copied = copy.deepcopy(cache)
        mapped = pytree.tree_map_only(torch.Tensor, lambda leaf, c=change, a=arguments: c(leaf, *a), copied)
        assert pytree.tree_structure(mapped) == spec


@pytest.mark.parametrize(("layers", "last", "count"), [("DW", "key_W8_1", 3), *(("DD", "key_1", n) for n in (3, 5, 6))])
def test_another_number_of_leaves_is_refused(layers, last, count):
    leaves, names = flatten_dynamic_cache(made(layers))
    with pytest.raises(SpecMismatchError, match=f"{last}.* was given {count} values instead of 4"):
        unflatten_dynamic_cache((leaves * 2)[:count], names)


MARKER = "open('marker', 'w')"


@pytest.mark.parametrize(
    "template",
    [
        {"keys": ["number"], "dtype": ["same", f"0 if {MARKER} else x0"]},
        {"keys": ["tensor"], "dtype": ["dtype", f"0].x, {MARKER}, x0[0"]},
        {"keys": ["tensor"], "device": ["device", [MARKER]]},
        {"keys": ["tensor"], "batch_size": ["shape", 0, MARKER]},
        {"keys": ["tensor"], "batch_size": ["shape", 0.0, 1]},
        {"keys": ["tensor"], "batch_size": ["shape", True, 1]},
        {"keys": ["tensor"], "__class__": ["fixed", {"!class": "logging:FileHandler"}]},
        {"keys": ["tensor"], "__dict__": ["fixed", {}]},
        {"keys": ["tensor"], "other": ["object", "logging:FileHandler", {}]},
        {"keys": ["tensor"], "other": ["object", "subprocess:Popen", {"args": ["fixed", ["touch", "marker"]]}]},
        {"keys": ["tensor"], "other": ["fixed", {"!function": "os:system"}]},
        {"keys": ["tensor"], "other": ["dict", [[["a"], ["tensor"]]]]},
        {"keys": ["tensor"], "other": ["dict", {"a": ["tensor"]}]},
        {"keys": ["tensor"], "other": ["list", "tensor"]},
        {"keys": ["tensor"], "other": ["compiled", MARKER]},
        {"keys": [MARKER]},
        {"keys": []},
        {"keys": "tensor"},
        [["keys", ["tensor"]]],
    ],
    ids=json.dumps,
)
def test_a_template_that_is_no_data_is_refused(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"layer_0=transformers.cache_utils:DynamicLayer={json.dumps(template)}", "keys_D_0"]
    with register_flattening_functions(patch_transformers=True), pytest.raises((FlattenError, TypeError)):
        unflatten_dynamic_cache([torch.ones(1)], names)
    assert not pathlib.Path("marker").exists()


def test_a_deep_template_is_refused():
    """A file does not choose how much memory a check takes."""
    deep = ["tensor"]
    for _ in range(40):
        deep = ["list", [deep]]
    with pytest.raises(CacheStructureError, match="more than 16 levels"):
        read_template(json.dumps({"keys": deep}))


@pytest.mark.parametrize(
    "name", ["logging:FileHandler", "torch.nn:Linear", "transformers:LlamaConfig", "a_stranger:Layer", "nothing"]
)
def test_another_class_is_no_layer(name):
    template = json.dumps({"keys": ["tensor"]})
    with pytest.raises(CacheStructureError, match="not a known class of cache layers"):
        unflatten_layers([torch.ones(1)], [f"layer_0={name}={template}", "keys_D_0"])


def test_what_a_cache_states_itself_is_read():
    layer = cache_utils.DynamicLayer()
    layer.update(torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    layer.note = {"a": (1, 2.0, torch.float16)}
    values, names = flatten_layers([layer], plain=True)
    (back,) = unflatten_layers(values, names)
    assert back.note == layer.note
    assert type(back) is type(layer)
