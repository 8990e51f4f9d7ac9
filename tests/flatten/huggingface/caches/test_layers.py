"""The table of layer classes: letters, what the configuration fixes, and what a layer is rebuilt from."""

import pytest
import torch
from transformers import cache_utils

from yobx_flatten.errors import CacheStructureError, UnsupportedLayerError
from yobx_flatten.huggingface.caches.layers import LETTERS, kind_of, kind_of_code

HAS_POSITION = hasattr(cache_utils.StaticLayer(4), "cumulative_length")
StaticSliding = getattr(cache_utils, "StaticSlidingWindowLayer", None) or cache_utils.SlidingWindowLayer

# letter -> an empty layer and its code
LAYERS = {
    "D": (cache_utils.DynamicLayer, "D"),
    "W": (lambda: cache_utils.DynamicSlidingWindowLayer(8), "W8"),
    "S": (lambda: cache_utils.StaticLayer(16), "S16"),
    "X": (lambda: StaticSliding(16, 8), "X8"),
}
every_layer = pytest.mark.parametrize("letter", LAYERS)


def states(length=3):
    return torch.ones(2, 2, length, 4), torch.ones(2, 2, length, 4)


def filled(letter, length=3):
    layer = LAYERS[letter][0]()
    cache_position = {"cache_position": torch.arange(length)}  # static layers of transformers < 5.10 want it
    layer.update(*states(length), cache_position)
    return layer


@every_layer
def test_a_class_has_the_documented_letter_and_its_sizes(letter):
    """`D`, `W8`, `S16`, `X8`: a sliding static layer has room for its window only."""
    make, code = LAYERS[letter]
    layer = make()
    kind = kind_of(type(layer))
    assert (kind.letter, kind.code(layer)) == (letter, code)
    assert kind_of_code(code) == (kind, code[1:])
    assert LETTERS[type(layer).__name__] == letter


def test_static_and_sliding_follow_from_the_letter():
    """D grows, W slides, S is static, X both; what slides counts the tokens it saw, not only those it keeps."""
    kinds = {letter: kind_of_code(code)[0] for letter, (_, code) in LAYERS.items()}
    assert [letter for letter, kind in kinds.items() if kind.is_static] == ["S", "X"]
    assert [letter for letter, kind in kinds.items() if kind.counter is not None] == ["W", "X"]
    assert {getattr(filled(letter, 12), kinds[letter].counter) for letter in "WX"} == {12}


def test_a_layer_without_its_attributes_is_refused():
    """One that lost an attribute altogether is as half-initialised as one that holds `None`."""
    layer = filled("D")
    del layer.values
    with pytest.raises(CacheStructureError, match=r"layers\[3\].*values is None"):
        kind_of(type(layer)).is_filled(layer, 3)


def test_a_class_without_a_row_is_noted_once(caplog):
    """In the log, not in an error: its attributes speak for themselves."""
    cls = type("NewLayer", (cache_utils.DynamicLayer,), {"__module__": __name__})
    with caplog.at_level("DEBUG", logger="yobx_flatten"):
        assert [kind_of(cls), kind_of(cls)] == [None, None]
    assert [record.getMessage() for record in caplog.records] == [
        f"unknown cache layer {__name__}.NewLayer: flattened by its attributes"
    ]


def test_a_class_of_the_same_name_elsewhere_has_no_row():
    """Names alone prove nothing."""
    assert kind_of(type("DynamicLayer", (cache_utils.DynamicLayer,), {"__module__": "elsewhere"})) is None


@pytest.mark.parametrize("code", ["Q8", "", "w8", "W", "S", "Wr", "W8x", "X-1", "D8"])
def test_an_unknown_code_is_refused(code):
    """As in a program that a newer version saved."""
    with pytest.raises(UnsupportedLayerError, match="names no kind of cache layer"):
        kind_of_code(code)


def test_only_static_layers_that_count_in_a_tensor_have_a_position():
    """Which depends on the version of transformers."""
    kinds = {letter: kind_of_code(code)[0] for letter, (_, code) in LAYERS.items()}
    assert [kinds[letter].has_position for letter in "DWSX"] == [False, False, HAS_POSITION, HAS_POSITION]
    for letter in "SX" if HAS_POSITION else "":
        assert filled(letter, 3).cumulative_length.item() == 3
