"""Functions of transformers that a trace replaces: their parameters, and that they compute the same."""

import importlib
import inspect
import sys
import types
import warnings

import pytest
import torch
from transformers.cache_utils import Cache

from yobx_flatten import errors
from yobx_flatten.huggingface.tracing import layers, support
from yobx_flatten.huggingface.tracing.layers import layer_replacements
from yobx_flatten.huggingface.tracing.models import CHUNK_SCANS, OTHERS, SPARSE, model_replacements

# parameters of the methods of layers, which their versions take by position or hand on
OF_LAYERS = {
    "self", "key_states", "value_states", "query_length", "cache_position", "cache_kwargs", "max_cache_len",
    "sliding_window", "conv_states", "recurrent_states", "state_idx", "conv_kernel_size", "indexer_keys", "key",
    "new_indexer_keys", "layer_idx", "batch_size", "number_of_states", "indexer_key_states",
}  # fmt: skip


def installed():
    for models, owner, name, make in (*CHUNK_SCANS, *OTHERS, *SPARSE):
        for model in models:
            try:
                target = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
            except ImportError:  # a type that this release does not have
                continue
            target = target if owner is None else getattr(target, owner, None)
            if target is not None and name in vars(target):
                yield target, name, make


def test_each_version_knows_the_parameters_of_what_it_replaces():
    count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.ReplacedFunctionWarning)
        for target, name, make in installed():
            original = vars(target)[name]
            version = make(original)
            assert inspect.signature(version) == inspect.signature(original), (target, name)
            count += version is not original
    assert count >= 1


def test_masks_and_layers_have_the_parameters_that_their_versions_know():
    """A new parameter of a layer's method is noticed here, and not by a user."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.ReplacedFunctionWarning)
        for module, name, make in support.mask_replacements():
            make(vars(sys.modules["transformers.masking_utils"]).get(name) or vars(module)[name])
    for cls, name, _ in layer_replacements():
        takes = inspect.signature(vars(cls)[name]).parameters.values()
        named = {one.name for one in takes if one.kind is one.POSITIONAL_OR_KEYWORD}
        assert named <= OF_LAYERS, (cls, name, named - OF_LAYERS)


@pytest.fixture
def never_warned(monkeypatch):
    monkeypatch.setattr(layers, "_warned", type(layers._warned)())


@pytest.fixture
def mixer():
    """A layer as a model has it: its release has its own word for the cache."""

    def forward(self, hidden, past_key_values=None, attention_mask=None, **kwargs):
        return "original", hidden, past_key_values, attention_mask, kwargs

    return forward


def reads_cache(original):

    def forward(again, self, hidden, cache=None, **others):
        return again(hidden=-hidden), cache

    return forward


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("self", 1, "c", "m"), {"more": 2}),
        (("self", 1), {"past_key_values": "c", "attention_mask": "m", "more": 2}),
        ((), {"self": "self", "hidden": 1, "attention_mask": "m", "past_key_values": "c", "more": 2}),
    ],
)
def test_a_version_is_called_as_the_original_is(mixer, args, kwargs):
    version = layers.replacement(reads_cache)(mixer)
    assert version(*args, **kwargs) == (("original", -1, "c", "m", {"more": 2}), "c")


def test_another_signature_is_a_warning_with_its_name_once(mixer, never_warned):
    """A parameter that is not known could change the result: a version without it does not stand for the original."""

    def make(original):
        def forward(self, hidden, cache, rotations):
            raise AssertionError

        return forward

    with pytest.warns(
        errors.ReplacedFunctionWarning, match=r"mixer.*no argument rotations.*newest tested transformers:\n.*==5\."
    ):
        assert layers.replacement(make)(mixer) is mixer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert layers.replacement(make)(mixer) is mixer

    def scaled(self, hidden, cache, scale): ...

    def plain(self, hidden, cache): ...

    with pytest.warns(errors.ReplacedFunctionWarning, match=r"its argument scale is unknown"):
        assert layers.replacement(lambda original: plain)(scaled) is scaled


def test_a_changed_release_is_named_in_a_trace(monkeypatch, never_warned):
    changed = types.ModuleType("transformers.models.dbrx.modeling_dbrx")

    class DbrxExperts:
        def forward(self, hidden_states, top_k_index, top_k_weights, capacity): ...

    changed.DbrxExperts = DbrxExperts
    monkeypatch.setitem(sys.modules, changed.__name__, changed)
    (found,) = [row for row in model_replacements() if row[0] is DbrxExperts]
    with pytest.warns(errors.ReplacedFunctionWarning, match=r"DbrxExperts\.forward.*its argument capacity is"):
        assert found[2](DbrxExperts.forward) is DbrxExperts.forward


has_chunk_functions = pytest.mark.skipif(
    not hasattr(Cache, "get_recurrent_state"), reason="before 5.23 these functions have another form"
)

ROWS, TOKENS, HEADS, KEY, VALUE = 2, 11, 4, 3, 5  # eleven tokens are two chunks of four, and a part of one


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def arguments(name, state):
    if name == "mamba2_chunk_scan":
        tokens = (random(ROWS, TOKENS, HEADS, VALUE), random(ROWS, TOKENS, HEADS), -random(HEADS).abs())
        given = (*tokens, random(ROWS, TOKENS, 2, KEY), random(ROWS, TOKENS, 2, KEY) + 1, 4, random(HEADS))
        start = random(ROWS, HEADS, VALUE, KEY) if state else None
        options = {"dt_bias": random(HEADS), "dt_softplus": True, "dt_limit": (0.0, 2.0), "return_final_states": True}
        return given, {**options, "initial_states": start}
    is_kimi = "kimi" in name
    heads = HEADS if is_kimi else 2
    decay = random(ROWS, TOKENS, HEADS, KEY) if is_kimi else random(ROWS, TOKENS, HEADS)
    given = (random(ROWS, TOKENS, heads, KEY), random(ROWS, TOKENS, heads, KEY) + 1, random(ROWS, TOKENS, HEADS, VALUE))
    start = random(ROWS, HEADS, KEY, VALUE) if state else None
    beta = random(ROWS, TOKENS, HEADS).sigmoid()
    options = {"chunk_size": 4, "output_final_state": True, "use_qk_l2norm_in_kernel": True, "initial_state": start}
    return (*given, -decay.abs(), beta), options


# of functions that are alike in several models, one
ONE_OF_EACH = [(models[0], name, make) for models, _, name, make in CHUNK_SCANS]


@has_chunk_functions
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(("model", "name", "make"), ONE_OF_EACH, ids=[name for _, name, _ in ONE_OF_EACH])
def test_a_scan_over_tokens_is_what_the_chunks_compute(model, name, make, state):
    original = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    given, options = arguments(name, state)
    for found, wanted in zip(make(original)(*given, **options), original(*given, **options), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
