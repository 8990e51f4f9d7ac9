"""One program for all lengths, for models whose own functions loop over tokens, experts, windows or queries."""

import pytest
import torch
from transformers import ProphetNetConfig, ProphetNetForCausalLM
from transformers.cache_utils import Cache

from matrix.models import make_model
from tests.cache_words import WORD, cache_of
from tests.cases import cases
from tests.flatten.huggingface.tracing.one_graph import WINDOW, assert_serves, export_decode, small_model, some_sizes
from tests.models import SIZES
from yobx_flatten import Case, DecodeSizes, export_onnx, register_flattening_functions

pytestmark = [
    pytest.mark.skipif(
        not hasattr(Cache, "get_recurrent_state"),
        reason="before 5.23 these models loop over experts and tokens in functions of another form",
    ),
    pytest.mark.slow,
]


_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
_JAMBA |= {"num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
_MINIMAX = {"layer_types": ["full_attention", "linear_attention"], "num_local_experts": 2, "head_dim": 8}
MODELS = {
    "jamba": ("JambaConfig", "JambaForCausalLM", _JAMBA),
    "minimax": ("MiniMaxConfig", "MiniMaxForCausalLM", {**_MINIMAX, "block_size": 4}),
    "zaya": ("ZayaConfig", "ZayaForCausalLM", {"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1}),
}
EXAMPLE = DecodeSizes(2, WINDOW + 4, 3)


_DBRX = dict.fromkeys((*SIZES, "num_key_value_heads", "max_position_embeddings"), ...)
_DBRX |= {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}
_DBRX["attn_config"] = {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}
_DBRX["ffn_config"] = {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}


def test_experts_have_one_program():
    """A loop over the experts that are hit, which no trace can follow, is a product with all of them."""
    model = small_model("DbrxConfig", "DbrxForCausalLM", _DBRX)
    with register_flattening_functions(patch_transformers=True):
        assert_serves(export_decode(model, EXAMPLE), model, some_sizes())


@pytest.mark.parametrize("name", cases(MODELS, quick=["jamba"]))
def test_a_recurrence_has_one_program(name):
    model = small_model(*MODELS[name])
    with register_flattening_functions(patch_transformers=True):
        assert_serves(export_decode(model, EXAMPLE), model, some_sizes())


# 5.24 has the first model that calls its layers in a loop; where only the last call writes, the others read the past
LOOPED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "sliding_window": WINDOW}
LOOPED |= {"n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 3, "ngpt_alpha_init": 0.5, "head_dim": 8}


@pytest.mark.parametrize("mode", cases(["per_loop", "last_loop"], quick=["last_loop"]))
def test_a_loop_over_layers_has_one_program(mode):
    model = small_model("DoryConfig", "DoryForCausalLM", {**LOOPED, "recurrent_kv_cache_mode": mode})
    with register_flattening_functions(patch_transformers=True):
        assert_serves(export_decode(model, DecodeSizes(2, 5, 3)), model, some_sizes())


# the longest traces of all: `make extended` has them and `make test` none
@pytest.mark.extended
@pytest.mark.parametrize("name", ["deepseek_v4", "qwen4_exp_text"])
def test_attention_to_chosen_keys_has_one_program(name):
    model = make_model(name)
    # a cache that has closed a window differs from one that has not: each of these has
    sizes = (3, 6, 2), (3, 7, 1), (2, 2 * WINDOW + 4, 3), (3, 6, 3, 3)
    with register_flattening_functions(patch_transformers=True):
        assert_serves(export_decode(model, DecodeSizes(2, 5, 3)), model, [DecodeSizes(*some) for some in sizes])


def test_positions_from_the_mask_have_one_program():
    """OPT cuts the positions of a padded mask behind the past: one program for one token and many."""
    model = small_model("OPTConfig", "OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32})
    with register_flattening_functions(patch_transformers=True):
        assert_serves(export_decode(model, EXAMPLE), model, some_sizes())


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
