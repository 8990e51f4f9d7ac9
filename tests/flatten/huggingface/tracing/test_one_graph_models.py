"""One program of a model whose layers slide, share keys, keep states or choose experts serves every length."""

import copy
import functools

import pytest
import torch
import transformers
from transformers import ProphetNetConfig, ProphetNetForCausalLM
from transformers.cache_utils import Cache

from matrix.models import make_model as make_model_of_type
from tests.cache_words import WORD, cache_of
from tests.cases import cases
from tests.flatten.huggingface.tracing.one_graph import assert_serves, export_decode, inputs, small_model, some_sizes
from tests.models import SIZES as MODEL_SIZES
from tests.models import WINDOW, make_model
from yobx_flatten import Case, DecodeSizes, decode_inputs, dynamic_shapes, export_onnx, register_flattening_functions
from yobx_flatten.huggingface.decoders import SlidingDecoder, why_not_sliding

pytestmark = pytest.mark.slow

EXAMPLE = DecodeSizes(batch=2, past=WINDOW + 4, new=3)


@pytest.mark.parametrize("codes", [False, True], ids=["tokens", "tokens with codes beside them"])
def test_the_length_of_the_mask_stands_for_the_counter(codes):
    """Tokens with codes beside them are counted by their second axis."""
    if codes:
        model = make_codes_model()
        tokens = torch.randint(1, 5, (2, 5, 3), generator=torch.Generator().manual_seed(0))
        kwargs = {"input_ids": tokens[:, 3:], WORD: cache_of(model(input_ids=tokens[:, :3], use_cache=True))}
    else:
        model = make_model("mistral")
        kwargs = decode_inputs(model, DecodeSizes(batch=2, past=3, new=2))
        del kwargs["attention_mask"]
    kwargs["use_cache"] = True
    assert why_not_sliding(model, kwargs, WORD) is None
    decoder = SlidingDecoder(model, kwargs, WORD)
    given = decoder.inputs(kwargs)
    cache = cache_of(kwargs)
    with torch.no_grad():
        for step in range(WINDOW):
            assert given["attention_mask"].tolist() == [[1] * (5 + 2 * step)] * 2
            assert codes or given["position_ids"].tolist() == [[3 + 2 * step, 4 + 2 * step]] * 2
            found = decoder(**given)
            # without a mask, transformers 5.17 lets the first of two new tokens of such a model read the second
            mask = {"attention_mask": given["attention_mask"]} if codes else {}
            expected = model(input_ids=given["input_ids"], **mask, **{WORD: cache}, use_cache=True)
            torch.testing.assert_close(found["logits"], expected.logits, atol=1e-5, rtol=1e-5)
            given = decoder.next_inputs(given, found, seed=step)
    assert codes or cache_of(given)[0]["key"].shape[2] == WINDOW - 1


def make_codes_model():
    from transformers import KyutaiSpeechToTextConfig, KyutaiSpeechToTextForConditionalGeneration, MimiConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    small = {"intermediate_size": 32, "num_filters": 4, "codebook_size": 8, "codebook_dim": 8, "upsample_groups": 32}
    vocabularies = {"vocab_size": 40, "codebook_vocab_size": 9, "pad_token_id": 3, "audio_pad_token_id": 8}
    lengths = {"num_codebooks": 2, "ffn_dim": 64, "max_position_embeddings": 64, "sliding_window": WINDOW}
    codec = MimiConfig(**sizes, **small).to_dict()
    config = KyutaiSpeechToTextConfig(**sizes, **vocabularies, **lengths, codec_config=codec)
    return KyutaiSpeechToTextForConditionalGeneration(config).eval()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"token_type_ids": torch.ones(2, 3)}, "the inputs contain token_type_ids"),
        ({"input_ids": None}, "there are no input_ids"),
        ({"attention_mask": torch.ones(2, 1, 3, 8)}, "attention_mask has not the shape (batch, length)"),
        ({"use_cache": True}, None),
    ],
)
def test_inputs_that_tools_do_not_feed_are_named(more, reason):
    """Then the counter stays among the inputs of a file, and the report says why."""
    model = make_model("mistral")
    assert why_not_sliding(model, {**decode_inputs(model, DecodeSizes()), **more}, WORD) == reason


def test_a_specification_for_the_model_becomes_one_for_its_parts():
    model = make_model("mistral")
    kwargs = decode_inputs(model, DecodeSizes())
    decoder = SlidingDecoder(model, kwargs, WORD)
    given = {"input_ids": {0: "rows"}, "attention_mask": None, "past_key_values.value_W8_1": None}
    found = decoder.shapes(dynamic_shapes(kwargs, given))
    assert (found["input_ids"], found["attention_mask"]) == ({0: "rows"}, None)
    assert set(found["position_ids"]) == {0, 1}
    assert [set(layer["key"]) for layer in found["cache"]] == [{0, 2}, {0, 2}]
    assert found["cache"][1]["value"] is None
    assert decoder.shapes(None) is None


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
ROOM = 64

has_lists_of_layers = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17),
    reason="before 5.17 static caches are told the positions, and lists of layers come in another form",
)


def _model(name):
    return small_model(*MODELS[name])


@functools.cache
def _static_program(name):
    return export_decode(_model(name), EXAMPLE, room=ROOM)


@has_lists_of_layers
@pytest.mark.parametrize("name", cases(MODELS, quick=["mistral", "gpt_oss"]))
def test_a_static_cache_has_one_program(name):
    with register_flattening_functions(patch_transformers=True):
        assert_serves(_static_program(name), _model(name), some_sizes(), room=ROOM)


@has_lists_of_layers
@pytest.mark.parametrize("name", cases(["cohere2", "gpt_oss", "llama4", "gemma3n"], quick=["gpt_oss", "llama4"]))
def test_a_dynamic_cache_has_one_program(name):
    """Chunked layers (Llama 4) and layers that read another one's keys (Gemma 3n), too."""
    model = _model(name)
    with register_flattening_functions(patch_transformers=True):
        assert_serves(export_decode(model, EXAMPLE), model, some_sizes())


@has_lists_of_layers
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


has_functions_of_experts = pytest.mark.skipif(
    not hasattr(Cache, "get_recurrent_state"),
    reason="before 5.23 these models loop over experts and tokens in functions of another form",
)


_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
_JAMBA |= {"num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
_MINIMAX = {"layer_types": ["full_attention", "linear_attention"], "num_local_experts": 2, "head_dim": 8}
_DBRX = dict.fromkeys((*MODEL_SIZES, "num_key_value_heads", "max_position_embeddings"), ...)
MODELS_OF_MATRIX = {
    "jamba": ("JambaConfig", "JambaForCausalLM", _JAMBA),
    "minimax": ("MiniMaxConfig", "MiniMaxForCausalLM", {**_MINIMAX, "block_size": 4}),
    "zaya": ("ZayaConfig", "ZayaForCausalLM", {"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1}),
    # a loop over the experts that are hit, which no trace can follow, is a product with all of them
    "dbrx": ("DbrxConfig", "DbrxForCausalLM", _DBRX),
    # cuts the positions of a padded mask behind the past: one program for one token and many
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}


_DBRX |= {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}
_DBRX["attn_config"] = {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}
_DBRX["ffn_config"] = {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}


@has_functions_of_experts
@pytest.mark.parametrize("name", cases(MODELS_OF_MATRIX, quick=["jamba", "dbrx", "opt"]))
def test_recurrences_experts_and_positions_have_one_program(name):
    model = small_model(*MODELS_OF_MATRIX[name])
    with register_flattening_functions(patch_transformers=True):
        assert_serves(export_decode(model, EXAMPLE), model, some_sizes())


# 5.24 has the first model that calls its layers in a loop; where only the last call writes, the others read the past
LOOPED = {**_MIXED, "layer_types": _MIXED["layer_types"] * 2, "num_hidden_layers": 4}
LOOPED |= {"n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 3, "ngpt_alpha_init": 0.5, "head_dim": 8}


@has_functions_of_experts
@pytest.mark.parametrize("mode", cases(["per_loop", "last_loop"], quick=["last_loop"]))
def test_a_loop_over_layers_has_one_program(mode):
    model = small_model("DoryConfig", "DoryForCausalLM", {**LOOPED, "recurrent_kv_cache_mode": mode})
    with register_flattening_functions(patch_transformers=True):
        assert_serves(export_decode(model, DecodeSizes(2, 5, 3)), model, some_sizes())


# the longest traces of all: `make extended` has them and `make test` none
@has_functions_of_experts
@pytest.mark.extended
@pytest.mark.parametrize("name", ["deepseek_v4", "qwen4_exp_text"])
def test_attention_to_chosen_keys_has_one_program(name):
    model = make_model_of_type(name)
    # a cache that has closed a window differs from one that has not: each of these has
    sizes = (3, 6, 2), (3, 7, 1), (2, 2 * WINDOW + 4, 3), (3, 6, 3, 3)
    with register_flattening_functions(patch_transformers=True):
        assert_serves(export_decode(model, DecodeSizes(2, 5, 3)), model, [DecodeSizes(*some) for some in sizes])


@has_functions_of_experts
def test_a_model_that_takes_one_token_at_a_time_keeps_its_example(tmp_path):
    """ProphetNet refuses several tokens beside a cache, and adds up positions: one program, one token, any past."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "decoder_ffn_dim": 16, "encoder_ffn_dim": 16}
    layers = {"num_decoder_layers": 1, "num_encoder_layers": 1, "num_decoder_attention_heads": 2}
    torch.manual_seed(0)
    config = ProphetNetConfig(**sizes, **layers, num_encoder_attention_heads=2, add_cross_attention=False)
    model = ProphetNetForCausalLM(config).eval()
    tokens = torch.randint(4, 32, (3, 9))

    def after(batch, past):
        cache = None
        for step in range(past):
            cache = cache_of(model(tokens[:batch, step : step + 1], **{WORD: cache}, use_cache=True))
        return {"input_ids": tokens[:batch, past : past + 1], WORD: cache, "use_cache": True}

    with torch.no_grad():
        example, other = after(2, 5), after(3, 8)
    exported = export_onnx(model, (), example, tmp_path / "model.onnx", cases=[Case("other", (), other)])
    assert len(exported.report.cases) == 4
    assert any("input_ids axis 1" in remark for remark in exported.report.remarks)
