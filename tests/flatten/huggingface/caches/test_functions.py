"""Caches come apart into their own tensors, and what is put together from them goes on as the original would."""

import contextlib
import copy
import functools
import operator
import pickle

import pytest
import torch
import torch.fx
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from tests.models import ENCODER_DECODERS, WINDOW, continued_alike, go_on, new_cache, start
from yobx_flatten import register_flattening_functions
from yobx_flatten.errors import CacheStructureError, SpecMismatchError
from yobx_flatten.huggingface.builders import (
    make_dynamic_cache,
    make_encoder_decoder_cache,
    make_static_cache,
)
from yobx_flatten.huggingface.caches.functions import (
    flatten_dynamic_cache,
    flatten_encoder_decoder_cache,
    flatten_static_cache,
    flatten_with_keys_dynamic_cache,
    unflatten_dynamic_cache,
)
from yobx_flatten.trees.describe import string_type

HAS_FLAG = hasattr(DynamicLayer(), "is_initialized")
HAS_RECORDING = hasattr(cache_utils.DynamicSlidingWindowLayer, "activate_past_recording")
HAS_POSITION = hasattr(cache_utils.StaticLayer(4), "cumulative_length")
# later versions keep the old name as another name of the class
STATIC_SLIDING = next(name for name in ("StaticSlidingWindowLayer", "SlidingWindowLayer") if hasattr(cache_utils, name))
needs_recording = pytest.mark.skipif(not HAS_RECORDING, reason="transformers < 5.17 does not record the past")

BELOW, LAST_BELOW, AT, PAST = WINDOW - 3, WINDOW - 1, WINDOW, WINDOW + 4

# model, static cache, tokens seen
REAL = [
    ("llama", False, 5),
    ("gemma2", False, BELOW),
    ("gemma2", False, LAST_BELOW),
    ("gemma2", False, AT),
    ("gemma2", False, PAST),
    ("gemma3", False, BELOW),
    ("gemma3", False, PAST),
    ("mistral", False, BELOW),
    ("mistral", False, AT),
    ("mistral", False, PAST),
    ("llama", True, 5),
    ("gemma2", True, BELOW),
    ("gemma2", True, LAST_BELOW),
    ("gemma2", True, PAST),
    ("gemma3", True, BELOW),
    ("gemma3", True, PAST),
    ("mistral", True, PAST),
    ("t5", False, 5),
    ("t5", True, 5),
    ("bart", False, 5),
    ("bart", True, 5),
]
REAL_IDS = [f"{name}-{'static' if static else 'dynamic'}-{past}" for name, static, past in REAL]
real_caches = pytest.mark.parametrize(("name", "static", "past"), REAL, ids=REAL_IDS)


@pytest.fixture
def block():
    """Inside it the caches are nodes."""
    with register_flattening_functions(patch_transformers=True):
        yield


def round_trip(cache):
    return pytree.tree_unflatten(*pytree.tree_flatten(cache))


def names_of(cache):
    return flatten_dynamic_cache(cache)[1]


def states(length=3, *, batch=2, dtype=torch.float32, device="cpu"):
    shape = (batch, 2, length, 4)
    return torch.ones(shape, dtype=dtype, device=device), torch.ones(shape, dtype=dtype, device=device)


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


# -- names


def test_a_cache_of_full_layers_has_the_plain_names():
    """Only where another layer stands beside them do the names say what each layer is."""
    leaves, names = flatten_dynamic_cache(made("DDD"))
    assert names == ["key_0", "value_0", "key_1", "value_1", "key_2", "value_2"]
    assert len(leaves) == 6


def test_a_mixed_cache_says_of_each_layer_what_it_is():
    """The length of the sliding layers is that of the full one, so it needs no leaf."""
    leaves, names = flatten_dynamic_cache(made("DWD"))
    assert names == ["key_D_0", "value_D_0", "key_W8_1", "value_W8_1", "key_D_2", "value_D_2"]
    assert len(leaves) == 6


def test_a_cache_of_sliding_layers_ends_in_its_length():
    """No leaf's shape tells how many tokens were seen, so one integer leaf does."""
    leaves, names = flatten_dynamic_cache(made("WW", length=12))
    assert names == ["key_W8_0", "value_W8_0", "key_W8_1", "value_W8_1", "length"]
    assert leaves[-1] == 12
    assert [tuple(leaf.shape) for leaf in leaves[:-1]] == [(2, 2, 7, 4)] * 4


def test_static_layers_list_the_tensor_they_count_with():
    """Sliding ones count in an integer beside it, one for the whole cache."""
    leaves, names = flatten_static_cache(made("SX", length=12))
    if HAS_POSITION:
        assert names == [
            *("key_S16_0", "value_S16_0", "position_S16_0"),
            *("key_X8_1", "value_X8_1", "position_X8_1", "length"),
        ]
        assert [int(leaves[2]), leaves[-1]] == [12, 12]
    else:
        assert names == ["key_S16_0", "value_S16_0", "key_X8_1", "value_X8_1", "length"]
        assert leaves[-1] == 12


def test_a_cache_of_full_static_layers_has_no_length():
    """A full static layer knows its position from its own tensors."""
    names = flatten_static_cache(made("SS"))[1]
    assert "length" not in names
    assert [name for name in names if name.startswith("key")] == ["key_S16_0", "key_S16_1"]


def test_layers_that_hold_nothing_keep_their_place():
    """Left out, they would shift every later layer to another layer's tensors."""
    cache = made("WDW")
    cache.layers[0] = cache_utils.DynamicSlidingWindowLayer(WINDOW)
    cache.layers[2] = cache_utils.DynamicSlidingWindowLayer(WINDOW)
    leaves, names = flatten_dynamic_cache(cache)
    assert names == ["none_W8_0", "key_D_1", "value_D_1", "none_W8_2"]
    rebuilt = unflatten_dynamic_cache(leaves, names)
    assert [layer.keys for layer in rebuilt.layers] == [None, leaves[0], None]
    assert [type(layer).__name__ for layer in rebuilt.layers] == [type(x).__name__ for x in cache.layers]


def test_the_layers_of_a_fresh_static_cache_keep_their_place():
    """A static cache that was never used has no leaves, and all its layers."""
    cache = new_cache("gemma2", static=True)
    leaves, names = flatten_static_cache(cache)
    assert (leaves, names) == ([], ["none_X8_0", "none_S32_1"])


def test_an_encoder_decoder_cache_has_two_children():
    """Each is a node of its own, with its own names."""
    cache = made("DD|DD")
    children, names = flatten_encoder_decoder_cache(cache)
    assert names == ["self_attention_cache", "cross_attention_cache"]
    assert children == [cache.self_attention_cache, cache.cross_attention_cache]


def test_the_documented_example_prints_what_it_prints(capsys):
    """The seed document's example, with the import lines changed."""
    bsize, nheads, slen, dim = 2, 4, 3, 7
    sliding_window = slen  # sliding_window must be >= the sequence length

    # Build a DynamicCache with two different layer types.
    cache = make_dynamic_cache(
        [
            (
                torch.randn(bsize, nheads, slen, dim),
                torch.randn(bsize, nheads, slen, dim),
            ),
            (
                torch.randn(bsize, nheads, slen, dim),
                torch.randn(bsize, nheads, slen, dim),
            ),
        ],
        cls_layers=[
            transformers.cache_utils.DynamicLayer,
            transformers.cache_utils.DynamicSlidingWindowLayer,
        ],
        cls_kwargs=[{}, {"sliding_window": sliding_window}],
    )
    print("cache:", string_type(cache, with_shape=True))  # noqa: T201 # the document's own line

    # Flatten (serialize) the cache — the context encodes each layer's type.
    flat, context = flatten_dynamic_cache(cache)
    print("context keys:", context)  # noqa: T201 # the document's own line

    # Unflatten (deserialize) the cache — layer types are restored from the context.
    rebuilt = unflatten_dynamic_cache(flat, context)
    print("layer types:", [type(layer).__name__ for layer in rebuilt.layers])  # noqa: T201 # the document's own line
    print("sliding_window:", rebuilt.layers[1].sliding_window)  # noqa: T201 # the document's own line
    assert capsys.readouterr().out == (
        "cache: DynamicCache(DynamicLayer(T1s2x4x3x7, T1s2x4x3x7), "
        "DynamicSlidingWindowLayer(T1s2x4x3x7, T1s2x4x3x7))\n"
        "context keys: ['key_D_0', 'value_D_0', 'key_W3_1', 'value_W3_1']\n"
        "layer types: ['DynamicLayer', 'DynamicSlidingWindowLayer']\n"
        "sliding_window: 3\n"
    )


# -- lossless


@real_caches
def test_a_rebuilt_cache_generates_the_same_logits(block, name, static, past):
    """Eight more tokens, bit by bit."""
    started = start(name, static=static, past=past)
    assert continued_alike(started, round_trip(started.cache), steps=8)


@pytest.mark.parametrize("past", [BELOW, PAST])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_left_padding_and_chunks_go_on_alike(block, name, static, past):
    """Rows padded on the left, three tokens per call: more than one position per row counts."""
    started = start(name, static=static, past=past, left_padding=2)
    # the static sliding layers of transformers 4.56 cannot take several tokens once they have some
    chunk = 1 if static and STATIC_SLIDING == "SlidingWindowLayer" else 3
    assert continued_alike(started, round_trip(started.cache), steps=2, chunk=chunk)


@pytest.mark.parametrize("past", [BELOW, PAST])
@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_the_comparison_notices_a_wrong_length(block, name, past):
    """The tests above mean something: a sliding layer that counts wrong gives other logits."""
    started = start(name, past=past)
    rebuilt = round_trip(started.cache)
    for layer in rebuilt.layers:
        if type(layer) is not DynamicLayer:
            layer.cumulative_length += 2
        else:
            layer.keys = layer.keys.roll(1, dims=-2)
    with contextlib.suppress(RuntimeError):  # masks and keys of different lengths
        assert not continued_alike(started, rebuilt, steps=3)


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


@real_caches
def test_every_attribute_comes_back(block, name, static, past):
    """The same attributes with the same values, tensors the very same objects, in each layer and in the cache."""
    cache = start(name, static=static, past=past).cache
    assert cache_differences(round_trip(cache), cache) == []


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mistral", "t5"])
def test_a_fresh_cache_comes_back_and_works(block, name, static):
    """A cache that holds nothing keeps its layers, and filling it gives what filling a new one gives."""
    cache = round_trip(new_cache(name, static=static))
    started = start(name, past=PAST, cache=cache)
    expected = start(name, past=PAST, static=static)
    for a, b in zip(go_on(started, steps=2), go_on(expected, steps=2), strict=True):
        assert torch.equal(a, b)


def test_an_empty_dynamic_cache_still_grows(block):
    """`DynamicCache()` makes its layers when they are first written to, rebuilt or not."""
    rebuilt = round_trip(DynamicCache())
    assert rebuilt.layers == []
    started = start("llama", past=5, cache=rebuilt)
    assert started.cache.get_seq_length() == 5
    assert len(started.cache.layers) == 2


@pytest.mark.parametrize("filled", [0, 1], ids=["layer 0 filled", "layer 1 filled"])
def test_a_partly_filled_dynamic_cache_still_grows(block, filled):
    """`DynamicCache()` written to at layer 1 first has an empty layer 0, and goes on making layers."""
    cache = DynamicCache()
    cache.update(*states(), filled)
    rebuilt = round_trip(cache)
    assert rebuilt.layer_class_to_replicate is DynamicLayer
    rebuilt.update(*states(), filled + 1)
    assert len(rebuilt.layers) == filled + 2


def test_a_configured_mixed_cache_does_not_grow(block):
    """A cache made from a configuration has all its layers; a further one is an error, as before."""
    cache = start("gemma2", past=5).cache
    assert cache.layer_class_to_replicate is None
    assert round_trip(cache).layer_class_to_replicate is None


@needs_recording
def test_recording_the_past_is_kept(block):
    """A cache that records for assisted decoding can be cropped after the round trip, as the original can."""
    cache = new_cache("gemma2")
    cache.activate_past_recording()
    started = start("gemma2", past=PAST, cache=cache)
    assert names_of(cache) == ["key_W8r_0", "value_W8r_0", "key_D_1", "value_D_1"]
    rebuilt = round_trip(cache)
    assert [getattr(layer, "record_past", None) for layer in rebuilt.layers] == [True, None]
    assert rebuilt.layers[0].keys.shape[-2] == PAST
    for one in (cache, rebuilt):
        one.crop(-2)
    assert cache_differences(rebuilt, cache) == [
        f"layers[{index}].{part}: {getattr(rebuilt.layers[index], part)!r} instead of "
        f"{getattr(cache.layers[index], part)!r}"
        for index in (0, 1)
        for part in ("keys", "values")
    ]  # cropping slices, so these are other tensors, of the same content:
    assert torch.equal(rebuilt.layers[0].keys, cache.layers[0].keys)
    # one step: transformers 5.17 itself fails at a second one without a crop in between
    assert continued_alike(started, rebuilt, steps=1)


@needs_recording
def test_recording_the_past_is_kept_by_layers_that_hold_nothing(block):
    """The next token would otherwise be recorded no more."""
    cache = new_cache("mistral")
    cache.activate_past_recording()
    assert [layer.record_past for layer in round_trip(cache).layers] == [True, True]


# -- is_updated of encoder-decoder caches


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_filled_cross_attention_stays_updated(block, name, static):
    """Rebuilt without it, the model would compute the encoder's keys again, and append them."""
    cache = start(name, past=4, static=static).cache
    rebuilt = round_trip(cache)
    assert rebuilt.is_updated == cache.is_updated == {0: True, 1: True}
    lengths = [tuple(layer.keys.shape) for layer in rebuilt.cross_attention_cache.layers]
    assert lengths == [(2, 4, 6, 8)] * 2


@pytest.mark.parametrize("flags", [{0: False, 1: False}, {0: True, 1: False}, {1: False}, {}, {0: True, 3: True}])
def test_other_flags_than_the_layers_show_are_kept(block, flags):
    """`reset` and user code may say "compute it again" although the layers are filled."""
    cache = made("DD|DD")
    cache.is_updated = dict(flags)
    rebuilt = round_trip(cache)
    assert rebuilt.is_updated == flags
    assert list(rebuilt.is_updated) == list(flags)


def test_a_fresh_encoder_decoder_cache_keeps_its_flags(block):
    """Made of two empty caches it has no flags, made from configurations one per layer."""
    assert round_trip(EncoderDecoderCache(DynamicCache(), DynamicCache())).is_updated == {}
    assert round_trip(new_cache("t5")).is_updated == {0: False, 1: False}


def test_encoder_and_decoder_may_have_other_layers(block):
    """Sliding self-attention over full cross-attention: the two lengths do not mix."""
    cache = made("WW|D", length=12)
    rebuilt = round_trip(cache)
    assert [layer.cumulative_length for layer in rebuilt.self_attention_cache.layers] == [12, 12]
    assert rebuilt.cross_attention_cache.get_seq_length() == 6


# -- no copies


class Operations(TorchDispatchMode):
    """Records every operation on tensors, making one included."""

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
    assert (operations.found, calls.found) == ([], [])
    assert all(map(operator.is_, leaves, again))
    assert all(leaf is kept for (_, leaf), kept in zip(keyed, leaves, strict=True))


@real_caches
def test_the_leaves_are_the_tensors_of_the_layers(block, name, static, past):
    """Each time the same objects: a temporary would lose its dynamic shapes in a trace."""
    cache = start(name, static=static, past=past).cache
    parts = [cache] if not isinstance(cache, EncoderDecoderCache) else [
        cache.self_attention_cache, cache.cross_attention_cache
    ]  # fmt: skip
    own = {id(tensor) for part in parts for layer in part.layers for tensor in vars(layer).values()}
    tensors = [leaf for leaf in pytree.tree_leaves(cache) if isinstance(leaf, torch.Tensor)]
    assert all(id(tensor) in own for tensor in tensors)
    assert len({id(tensor) for tensor in tensors}) == len(tensors)


# -- specs


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
    """Whatever the model was run over."""
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
    """What the configuration fixes tells caches apart, its windows and maximal lengths included."""
    caches = [made(layout) for layout in LAYOUTS]
    caches.append(make_dynamic_cache([states()], "DynamicSlidingWindowLayer", {"sliding_window": 5}))
    caches.append(make_dynamic_cache([states()], "DynamicSlidingWindowLayer", {"sliding_window": 6}))
    caches.append(make_static_cache([states()], 17))
    specs = [pytree.tree_structure(cache) for cache in caches]
    assert [specs.index(spec) for spec in specs] == list(range(len(specs)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_keyed_flatten_agrees_with_the_plain_one(block, layout):
    """The same leaves in the same order, each with its name."""
    cache = made(layout, length=12)
    leaves, spec = pytree.tree_flatten(cache)
    keyed, keyed_spec = pytree.tree_flatten_with_path(cache)
    assert keyed_spec == spec
    assert all(a is b for (_, a), b in zip(keyed, leaves, strict=True))
    assert len({pytree.keystr(path) for path, _ in keyed}) == len(leaves)


def test_a_key_path_is_the_name_of_the_leaf(block):
    """`[key_W8_1]`; behind an encoder-decoder cache, the name of the half first. Empty layers have no leaf."""
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
    assert all(map(operator.is_, found, leaves))
    assert cache_differences(cxx.tree_unflatten(found, spec), cache) == []


# -- placeholders

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
    """A sum, a flattened tensor, the mean over the rows: no longer keys, still the same tree."""
    cache = made(layout, length=12)
    spec = pytree.tree_structure(cache)
    for change in (torch.Tensor.sum, torch.Tensor.flatten, torch.Tensor.unsqueeze_):
        arguments = (0,) if change is torch.Tensor.unsqueeze_ else ()
        copied = copy.deepcopy(cache)
        mapped = pytree.tree_map_only(torch.Tensor, lambda leaf, c=change, a=arguments: c(leaf, *a), copied)
        assert pytree.tree_structure(mapped) == spec


def test_too_few_leaves_are_refused():
    """A wrong number of values says which names were expected."""
    leaves, names = flatten_dynamic_cache(made("DW"))
    with pytest.raises(SpecMismatchError, match=r"key_W8_1.* was given 3 values instead of 4"):
        unflatten_dynamic_cache(leaves[:3], names)


@pytest.mark.parametrize("count", [3, 5, 6])
def test_a_wrong_number_of_plain_leaves_is_refused(count):
    """A cache of full layers is no exception."""
    leaves, names = flatten_dynamic_cache(made("DD"))
    with pytest.raises(SpecMismatchError, match=f"key_1.* was given {count} values instead of 4"):
        unflatten_dynamic_cache((leaves * 2)[:count], names)


# -- torch.fx


def traced_sum(cache):
    """A graph module that takes a cache of this structure apart as fx does."""

    def total(cache):
        return functools.reduce(operator.add, [layer.keys + layer.values for layer in cache.layers])

    holders = pytree.tree_map(lambda leaf: torch.fx.PH, cache)
    return torch.fx.symbolic_trace(total, concrete_args={"cache": holders})


def test_a_traced_program_takes_caches_of_its_structure(block):
    """Of another batch and length too."""
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
    """Both classes are named."""
    program = traced_sum(made("DD"))
    with pytest.raises(SpecMismatchError, match=r"(?s)DynamicCache.*StaticCache"):
        program(made("SS"))


# -- bad input


def break_layer(layer, broken):
    for name, value in broken.items():
        setattr(layer, name, value)


HALF_INITIALISED = [
    {"keys": None},
    {"values": None},
    *([{"is_initialized": False}, {"is_initialized": False, "values": None}] if HAS_FLAG else []),
]


@pytest.mark.parametrize("broken", HALF_INITIALISED, ids=str)
@pytest.mark.parametrize("layout", ["DD", "DW", "WD", "WW", "SS", "SX"])
def test_a_half_initialised_layer_is_named_with_the_way_out(layout, broken):
    """Its index, its class, what it holds, and how to fill or empty it."""
    cache = made(layout)
    break_layer(cache.layers[1], broken)
    flatten = flatten_static_cache if layout[0] == "S" else flatten_dynamic_cache
    with pytest.raises(CacheStructureError) as caught:
        flatten(cache)
    message = str(caught.value)
    assert f"layers[1] is a half-initialised {type(cache.layers[1]).__name__}" in message
    assert "layer.update(keys, values)" in message


class OwnLayer(DynamicLayer):
    """A layer of the user's own."""


@pytest.mark.parametrize("layout", ["", "D", "DD", "DW"])
def test_a_layer_without_a_row_keeps_its_class_its_tensors_and_its_place(layout):
    """It comes apart by its attributes, not as the parent class, whose state may be less."""
    cache = made(layout) if layout else DynamicCache()
    own = OwnLayer()
    own.scale = 0.5
    own.update(*states())
    cache.layers = [*cache.layers[: len(layout)], own]
    rebuilt = unflatten_dynamic_cache(*flatten_dynamic_cache(cache))
    assert [type(layer) for layer in rebuilt.layers] == [type(layer) for layer in cache.layers]
    assert rebuilt.layers[-1].keys is own.keys
    assert rebuilt.layers[-1].values is own.values
    assert rebuilt.layers[-1].scale == 0.5


def test_sliding_layers_that_disagree_are_named():
    """One count serves the cache, so two different ones cannot be kept."""
    cache = made("WWW")
    cache.layers[2].cumulative_length = 9
    with pytest.raises(CacheStructureError, match=r"3 and, in layers\[2\] \(W8\), 9"):
        flatten_dynamic_cache(cache)


def test_a_sliding_layer_that_disagrees_with_the_full_one_is_named():
    """The full layer holds every token; a sliding one that has seen others cannot go on beside it."""
    cache = made("DWW")
    for layer in cache.layers[1:]:
        layer.cumulative_length = 9
    with pytest.raises(CacheStructureError, match=r"3 and, in layers\[1\] \(W8\), 9"):
        flatten_dynamic_cache(cache)


def test_full_layers_may_hold_different_lengths():
    """Cross-attention of several encoders, or a model that skips layers: each layer's length is in its own shape."""
    cache = make_dynamic_cache([states(3), states(5)])
    leaves, names = flatten_dynamic_cache(cache)
    rebuilt = unflatten_dynamic_cache(leaves, names)
    assert [rebuilt.get_seq_length(0), rebuilt.get_seq_length(1)] == [3, 5]


def test_a_failed_flatten_leaves_the_cache_as_it_was():
    """It can be repaired and used."""
    cache = made("DW")
    cache.layers[1].cumulative_length = 9
    before = [dict(vars(layer)) for layer in cache.layers]
    with pytest.raises(CacheStructureError):
        flatten_dynamic_cache(cache)
    assert all(vars(layer).keys() == held.keys() for layer, held in zip(cache.layers, before, strict=True))
    cache.layers[1].cumulative_length = 3
    assert len(flatten_dynamic_cache(cache)[0]) == 4


# -- offloading


def test_an_offloading_cache_is_refused_or_kept(block):
    """A rebuilt cache that silently stops offloading would run out of memory later."""
    cache = made("DD")
    cache.offloading, cache.only_non_sliding, cache.prefetch_stream = True, False, None
    try:
        rebuilt = round_trip(cache)
    except CacheStructureError:
        return
    assert rebuilt.offloading
