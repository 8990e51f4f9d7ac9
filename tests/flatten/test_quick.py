"""What was read before is tried first, and believed only where it is still so."""

import pytest
import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tests.flatten.every_cache import LAYERS, differences, layer_of
from yobx_flatten.errors import StaticDataError
from yobx_flatten.huggingface import quick
from yobx_flatten.huggingface.layouts import flatten_layers, unflatten_layers

pytestmark = pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="layer classes of 5.23")
every_layer = pytest.mark.parametrize("name", LAYERS)


def read_anew(layers, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(quick, "_READINGS", {})
        return flatten_layers(layers, plain=True)


def mixed(name):
    """Layers of one kind between others."""
    return [layer_of("DynamicLayer"), layer_of(name), layer_of("DynamicSlidingWindowLayer"), layer_of(name)]


@every_layer
def test_the_second_time_gives_what_the_first_gave(name, monkeypatch):
    """The same names, the same leaves in the same order, also where kinds of layers take turns."""
    # those of UnlimitedOcr count the tokens behind the prefill, and stand beside none of the others
    kinds = [[layer_of(name), layer_of(name)]] if name.startswith("Unlimited") else [mixed(name), mixed(name)[:2]]
    for layers in kinds:
        leaves, names = read_anew(layers, monkeypatch)
        for _ in range(2):
            found, found_names = flatten_layers(layers, plain=True)
            assert found_names == names
            assert len(found) == len(leaves)
            assert all(a is b for a, b in zip(found, leaves, strict=True) if isinstance(b, torch.Tensor))
        rebuilt = unflatten_layers(leaves, names)
        assert [differences(a, b) for a, b in zip(rebuilt, layers, strict=True)] == [[]] * len(layers)


class Noted(DynamicLayer):
    """A layer with something of each kind."""

    def __init__(self):
        super().__init__()
        self.update(torch.ones(2, 2, 3, 4), torch.zeros(2, 2, 3, 4))
        self.mode = "mean"
        self.power = 2
        self.flags = {0: True, 1: False}
        self.parts = [torch.ones(1), (torch.zeros(1), 3)]
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
    "another count": lambda layer: setattr(layer, "seen_tokens", 4),
    "a flag for a count": lambda layer: setattr(layer, "seen_tokens", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_changed_is_read_anew(change, monkeypatch):
    """Whatever changed, the names are what they would have been without a first time."""
    layer = Noted()
    for _ in range(2):
        flatten_layers([layer], plain=True)
    CHANGES[change](layer)
    expected, names = read_anew([layer], monkeypatch)
    found, found_names = flatten_layers([layer], plain=True)
    assert found_names == names
    assert all(a is b for a, b in zip(found, expected, strict=True))


def test_what_cannot_be_stored_is_still_refused():
    """Having read a good layer before does not help a bad one."""
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


def test_few_readings_are_kept():
    """Caches of ever new sizes do not fill the memory."""
    for room in range(20, 40):
        layer = cache_utils.StaticLayer(room)
        layer.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
        assert flatten_layers([layer], plain=False)[1][0] == f"key_S{room}_0"
    assert len(quick._READINGS[False, cache_utils.StaticLayer]) == 8
