"""The names of a cache from a file: a template is data, whatever it holds, and classes are those of layers."""

import json
import pathlib

import pytest
import torch
import transformers.cache_utils as cache_utils

from yobx_flatten import FlattenError, register_flattening_functions, unflatten_dynamic_cache
from yobx_flatten.errors import CacheStructureError
from yobx_flatten.huggingface.caches.known_state import read_template
from yobx_flatten.huggingface.caches.layouts import flatten_layers, unflatten_layers

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
    """By an error of ours, before source is made of it."""
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
