"""Caches for the tests: of real models, and by letters; and how one cache differs from another."""

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

from tests.models import WINDOW
from yobx_flatten import flatten_dynamic_cache, make_dynamic_cache, make_encoder_decoder_cache, make_static_cache

HAS_FLAG = hasattr(DynamicLayer(), "is_initialized")
HAS_RECORDING = hasattr(cache_utils.DynamicSlidingWindowLayer, "activate_past_recording")
HAS_POSITION = hasattr(cache_utils.StaticLayer(4), "cumulative_length")
# later versions keep the old name as another name of the class
STATIC_SLIDING = next(name for name in ("StaticSlidingWindowLayer", "SlidingWindowLayer") if hasattr(cache_utils, name))
needs_recording = pytest.mark.skipif(not HAS_RECORDING, reason="transformers < 5.17 does not record the past")

BELOW, LAST_BELOW, AT, PAST = WINDOW - 3, WINDOW - 1, WINDOW, WINDOW + 4

# model, static cache, tokens seen
_PASTS = {
    ("llama", False): [5], ("gemma2", False): [BELOW, LAST_BELOW, AT, PAST], ("gemma3", False): [BELOW, PAST],
    ("mistral", False): [BELOW, AT, PAST], ("llama", True): [5], ("gemma2", True): [BELOW, LAST_BELOW, PAST],
    ("gemma3", True): [BELOW, PAST], ("mistral", True): [PAST], ("t5", False): [5], ("t5", True): [5],
    ("bart", False): [5], ("bart", True): [5],
}  # fmt: skip
REAL = [(name, static, past) for (name, static), pasts in _PASTS.items() for past in pasts]
REAL_IDS = [f"{name}-{'static' if static else 'dynamic'}-{past}" for name, static, past in REAL]
real_caches = pytest.mark.parametrize(("name", "static", "past"), REAL, ids=REAL_IDS)


def round_trip(cache):
    return pytree.tree_unflatten(*pytree.tree_flatten(cache))


def names_of(cache):
    return flatten_dynamic_cache(cache)[1]


def states(length=3, *, batch=2, dtype=torch.float32, device="cpu"):
    shape = (batch, 2, length, 4)
    return torch.ones(shape, dtype=dtype, device=device), torch.ones(shape, dtype=dtype, device=device)


def same_leaves(found, expected):
    """The same tensors; the number of tokens that sliding layers saw is in a tensor of its own at each flattening."""
    pairs = zip(found, expected, strict=True)
    return all(a is b or (a.shape == () and torch.equal(a, b)) for a, b in pairs)


def made(layout, length=3, **options):
    """A cache by letters: "DW" of a full and a sliding layer, "SX", "DD|D" with an encoder's."""
    if "|" in layout:
        own, cross = layout.split("|")
        return make_encoder_decoder_cache(made(own, length, **options), made(cross, 6, **options))
    classes = {
        "D": ("DynamicLayer", {}),
        "W": ("DynamicSlidingWindowLayer", {"sliding_window": WINDOW}),
        "S": ("StaticLayer", {}),
        "X": (STATIC_SLIDING, {"sliding_window": WINDOW}),
    }
    longest = {"W": WINDOW - 1, "X": WINDOW}
    pairs = [states(min(length, longest.get(letter, length)), **options) for letter in layout]
    arguments = {
        "cls_layers": [classes[letter][0] for letter in layout],
        "cls_kwargs": [classes[letter][1] for letter in layout],
    }
    if set(layout) & set("SX"):
        return make_static_cache(pairs, 16, **arguments, length=length)
    cache = make_dynamic_cache(pairs, **arguments)
    for layer in cache.layers:
        if "D" not in layout:
            layer.cumulative_length = length
    return cache


LAYOUTS = ["DD", "DW", "WD", "WWD", "WW", "SS", "SX", "XS", "XX", "DD|DD", "DW|D", "SS|S"]


def attribute_differences(rebuilt, original, *, ignored=()):
    """One sentence for each attribute that is not the same object, or for other values not equal and of one type."""
    left, right = vars(rebuilt), vars(original)
    found = [f"{name} is only in one of them" for name in sorted(left.keys() ^ right.keys())]
    for name in sorted((left.keys() & right.keys()) - set(ignored)):
        a, b = left[name], right[name]
        if isinstance(b, torch.Tensor):
            # one tensor beside each window, equal in all layers with that window; layers that hold nothing are new
            equal = name == "_sliding_window_tensor" or right["keys"] is None
            same = torch.equal(a, b) if equal else a is b
        else:
            same = type(a) is type(b) and a == b
        if not same:
            found.append(f"{name}: {a!r} instead of {b!r}")
    return found


def cache_differences(rebuilt, original):
    if isinstance(original, EncoderDecoderCache):
        caches = ("self_attention_cache", "cross_attention_cache")
        found = attribute_differences(rebuilt, original, ignored=caches)
        return found + [line for x in caches for line in cache_differences(getattr(rebuilt, x), getattr(original, x))]
    # whether a cache of full layers came from a configuration is not part of it: both kinds may grow when rebuilt
    found = attribute_differences(rebuilt, original, ignored=["layers", "layer_class_to_replicate"])
    assert type(rebuilt) is type(original)
    assert [type(layer) for layer in rebuilt.layers] == [type(layer) for layer in original.layers]
    for index, (a, b) in enumerate(zip(rebuilt.layers, original.layers, strict=True)):
        found += [f"layers[{index}].{line}" for line in attribute_differences(a, b)]
    return found
