"""One program for all lengths, for static, sliding, chunked, shared and hybrid layers."""

import copy
import functools

import pytest
import torch
import transformers
from transformers.cache_utils import StaticCache

from tests.cache_words import cache_of
from tests.cases import cases
from tests.flatten.huggingface.tracing.one_graph import (
    WINDOW,
    assert_serves,
    export_decode,
    inputs,
    small_model,
    some_sizes,
)
from yobx_flatten import DecodeSizes, register_flattening_functions

_SLIDES = {"sliding_window": WINDOW}
_MIXED = {**_SLIDES, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
_CHUNKS = {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"]}
# the last two layers read the keys of the first two
_SHARED = {**_SLIDES, "layer_types": _MIXED["layer_types"] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
_SHARED |= {"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0], "intermediate_size": [48] * 4, "laurel_rank": 8}
_SHARED |= {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "head_dim": 8}
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", _SLIDES),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_MIXED, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", _MIXED),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**_MIXED, **_EXPERTS}),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**_CHUNKS, **_EXPERTS, "no_rope_layers": [1, 0], "intermediate_size_mlp": 48},
    ),
    "gemma3n": ("Gemma3nTextConfig", "Gemma3nForCausalLM", _SHARED),
}
EXAMPLE = DecodeSizes(2, WINDOW + 4, 3)
ROOM = 64

pytestmark = [
    pytest.mark.skipif(
        tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17),
        reason="before 5.17 static caches are told the positions, and lists of layers come in another form",
    ),
    pytest.mark.slow,
]


def _model(name):
    return small_model(*MODELS[name])


@functools.cache
def _static_program(name):
    """Exported once, inside the block of the first test that asks for it."""
    return export_decode(_model(name), EXAMPLE, room=ROOM)


@pytest.mark.parametrize("name", cases(MODELS, quick=["mistral", "gpt_oss"]))
def test_a_static_cache_has_one_program(name):
    with register_flattening_functions(patch_transformers=True):
        assert_serves(_static_program(name), _model(name), some_sizes(), room=ROOM)


@pytest.mark.parametrize("name", cases(["cohere2", "gpt_oss", "llama4", "gemma3n"], quick=["gpt_oss", "llama4"]))
def test_a_dynamic_cache_has_one_program(name):
    """Chunked layers (Llama 4) and layers that read another one's keys (Gemma 3n), too."""
    model = _model(name)
    with register_flattening_functions(patch_transformers=True):
        assert_serves(export_decode(model, EXAMPLE), model, some_sizes())


def test_a_static_cache_comes_out_as_the_eager_one():
    model = _model("gemma2")
    with register_flattening_functions(patch_transformers=True):
        program = _static_program("gemma2")
        for sizes in some_sizes():
            case = inputs(model, sizes, ROOM)
            ours, theirs = copy.deepcopy(case), copy.deepcopy(case)
            with torch.no_grad():
                found, expected = cache_of(program(**ours)), cache_of(model(**theirs))
            for mine, eager in zip(found.layers, expected.layers, strict=True):
                torch.testing.assert_close(mine.keys, eager.keys)
                torch.testing.assert_close(mine.values, eager.values)
                assert torch.equal(mine.cumulative_length, eager.cumulative_length)
                assert getattr(mine, "cumulative_length_int", 0) == getattr(eager, "cumulative_length_int", 0)
            for given, eager in zip(cache_of(ours).layers, expected.layers, strict=True):
                torch.testing.assert_close(given.keys, eager.keys)


def test_the_layers_have_their_own_methods_behind_a_trace():
    from transformers.cache_utils import StaticSlidingWindowLayer

    copy.copy(StaticSlidingWindowLayer.__new__(StaticSlidingWindowLayer))  # Python notes __slotnames__ in the class
    before = dict(vars(StaticSlidingWindowLayer))
    model = _model("mistral")
    with register_flattening_functions(patch_transformers=True):
        export_decode(model, EXAMPLE, room=ROOM)
        assert dict(vars(StaticSlidingWindowLayer)) == before
    assert isinstance(StaticCache(config=model.config, max_cache_len=ROOM).layers[0], StaticSlidingWindowLayer)
