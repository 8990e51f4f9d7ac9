"""The table of layer classes: letters, what the configuration fixes, and what a layer is rebuilt from."""

import pytest
import torch
from transformers import cache_utils

from yobx_flatten.errors import CacheStructureError, UnsupportedLayerError
from yobx_flatten.huggingface.caches.layers import kind_of, kind_of_code

StaticSliding = getattr(cache_utils, "StaticSlidingWindowLayer", None) or cache_utils.SlidingWindowLayer

# letter -> an empty layer and its code
LAYERS = {
    "D": (cache_utils.DynamicLayer, "D"),
    "W": (lambda: cache_utils.DynamicSlidingWindowLayer(8), "W8"),
    "S": (lambda: cache_utils.StaticLayer(16), "S16"),
    "X": (lambda: StaticSliding(16, 8), "X8"),
}


def states(length=3):
    return torch.ones(2, 2, length, 4), torch.ones(2, 2, length, 4)


def filled(letter, length=3):
    layer = LAYERS[letter][0]()
    cache_position = {"cache_position": torch.arange(length)}  # static layers of transformers < 5.10 want it
    layer.update(*states(length), cache_position)
    return layer


def test_a_layer_without_its_attributes_is_refused():
    """One that lost an attribute altogether is as half-initialised as one that holds `None`."""
    layer = filled("D")
    del layer.values
    with pytest.raises(CacheStructureError, match=r"layers\[3\].*values is None"):
        kind_of(type(layer)).is_filled(layer, 3)


def test_a_class_of_the_same_name_elsewhere_has_no_row():
    """Names alone prove nothing."""
    assert kind_of(type("DynamicLayer", (cache_utils.DynamicLayer,), {"__module__": "elsewhere"})) is None


@pytest.mark.parametrize("code", ["Q8", "", "w8", "W", "S", "Wr", "W8x", "X-1", "D8"])
def test_an_unknown_code_is_refused(code):
    """As in a program that a newer version saved."""
    with pytest.raises(UnsupportedLayerError, match="names no kind of cache layer"):
        kind_of_code(code)
