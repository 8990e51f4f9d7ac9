"""Layers are read as they are now, whatever they were at the last flattening."""

import collections
import threading

import pytest
import torch
from transformers import LlamaConfig, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tests.flatten.huggingface.caches.cache_cases import same_leaves
from tests.flatten.huggingface.caches.every_cache import LAYERS, differences, layer_of
from yobx_flatten.errors import CacheStructureError, StaticDataError
from yobx_flatten.huggingface.caches import layouts
from yobx_flatten.huggingface.caches.layouts import flatten_layers, unflatten_layers

pytestmark = pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="layer classes of 5.23")
every_layer = pytest.mark.parametrize("name", LAYERS)


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


def test_what_cannot_be_stored_is_still_refused():
    layer = Noted()
    flatten_layers([layer], plain=True)
    layer.mode = lambda hidden: hidden
    with pytest.raises(StaticDataError, match="'mode'"):
        flatten_layers([layer], plain=True)


def test_a_window_is_remembered_on_every_device(monkeypatch):
    """Layers of one window may be on several devices: each is rebuilt with the tensor of its own."""
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
    """The first layer that has one is remembered, though a layer on the same device before it has none."""
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
def test_one_placeholder_among_tensors_keeps_its_place(name, placeholder):
    leaves, names = flatten_layers([layer_of(name), layer_of(name)], plain=True)
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
    wrong = []

    def work():
        for _ in range(20):
            for count, (leaves, names) in enumerate(flat, start=1):
                layers = unflatten_layers(leaves, names)
                if [layer.keys is leaf for layer, leaf in zip(layers, leaves[::2], strict=True)] != [True] * count:
                    wrong.append(count)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(layouts._RECENT) <= 8
