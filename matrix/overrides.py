"""What makes a configuration small: numbers by the name of the field, then what is particular to a type."""

from __future__ import annotations

from typing import Any

from .overrides_families import FAMILY_OVERRIDES

__all__ = ["ADJUSTMENTS", "OVERRIDES", "SIZES", "WINDOW_FIELDS"]

WINDOW_FIELDS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size")

SIZES: dict[str, Any] = {
    # width
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_dim", "embed_dim", "lru_width", "dim"), 64),
    "hidden_size_global": 64,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "d_inner", "dff"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "feed_forward_size", "mlp_dim"), 96),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "projection_dim", "hidden_dim"), 16),
    # depth
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "depth"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("d_kv", "d_head", "attention_head_size", "v_head_dim", "qk_nope_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "kv_lora_rank", "q_lora_rank", "o_lora_rank", "index_head_dim"), 16),
    "rotary_dim": 8,
    "index_n_heads": 32,  # few heads score many tokens exactly 0 (relu), and which of equals is chosen is left open
    "index_topk": 8,
    # vocabulary and positions
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"), 128),
    "unpadded_vocab_size": 124,  # logits are of these
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"), 256),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "attention_window_size"), 8),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_experts_intermediate_size"), 32
    ),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    # state space models
    **dict.fromkeys(("state_size", "mamba_d_state", "mamba_n_heads", "mamba_num_heads", "time_step_rank"), 8),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), 16),
    # encoders of images and sounds
    **dict.fromkeys(("image_size", "patch_size"), 14),
    "image_size": 28,
    "num_mel_bins": 16,
    "max_source_positions": 32,
    "vision_embed_dim": 64,
    "out_hidden_size": 64,
    # no dropout, and attention that looks at something: with 0.02 all tokens weigh nearly the same
    **dict.fromkeys(("attention_dropout", "hidden_dropout_prob", "dropout", "layerdrop"), 0.0),
    **dict.fromkeys(("initializer_range", "init_std"), 0.1),
}


# Fields that only fit together: when a configuration has the first, it also gets the others.
ADJUSTMENTS: list[tuple[str, dict[str, Any]]] = [
    # attention through a low rank: one key head per query head, the rotated part is the head size
    ("kv_lora_rank", {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "head_dim": 8}),
]

_MIXED = ["sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# the sliding layers of dots3_note have sizes of their own
_DOTS3 = {
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
    **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank", "swa_head_dim", "swa_v_head_dim"), 16),
    "swa_qk_nope_head_dim": 8,
}
# rotary positions of time, height and width share the halves of a head
_MROPE = {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}}
_MROPE_TYPES = ("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl")
_GEMMA4_ASSISTANT = {
    "num_hidden_layers": 2,
    "num_kv_shared_layers": 2,
    "layer_types": _MIXED,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}

# the two layers in the middle are called twice
_DORY = {
    "num_hidden_layers": 4,
    "layer_types": [*_MIXED, *_MIXED],
    "n_input_layers": 1,
    "n_recurrent_layers": 2,
    "n_output_layers": 1,
    "n_recurrent_loops": 2,
    "ngpt_alpha_init": 0.5,  # how much a layer changes what it is given
}

# `...` as a value keeps a field from being set; "default" goes to the default configuration that is then shrunk;
# "config" and "model" name classes where the automatic ones build something else.
OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus1p5_text": {"output_vocab_size": 100},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "blt": {
        "num_hidden_layers": 2,  # its own cache asks for it
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3, 4],
        "local_attention_window_len": 8,
    },
    "cohere_compass_text": {
        "num_hidden_layers": 2,
        "layer_types": _MIXED,
        "rope_parameters": dict.fromkeys(_MIXED, _ROPE),
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": _DOTS3,
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {
            "adapter_in_dim": 64,
            "adapter_out_dim": 64,
            "per_layer_config": {1: {"num_local_experts": 4}},
        },
        "audio_config": {"adapter_out_dim": 64, "adapter_input_size": 64, "conv_output_size": 64},
    },
    "dory": _DORY,
    "chameleon": {"default": {"vocabulary_map": {"<image>": 8}}, "vocabulary_map": {"<image>": 8}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "inkling2": {"vision_config": {"text_hidden_size": 64}, "audio_config": {"text_hidden_size": 64}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "glm4v_moe": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            }
        }
    },
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": [*_MIXED, *_MIXED],
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "intermediate_size": [96] * 4,
    },
    "gemma4_assistant": {
        "default": {"text_config": {"model_type": "gemma4_text", **_GEMMA4_ASSISTANT}},
        "text_config": _GEMMA4_ASSISTANT,
    },
    "gemma4_unified_assistant": {
        "text_config": {"num_hidden_layers": 2, "num_kv_shared_layers": 2, "layer_types": _MIXED}
    },
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {
        "num_hidden_layers": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "ministral": {"head_dim": 16},
    "musicgen": {"config": "MusicgenDecoderConfig", "model": "MusicgenForCausalLM", "num_codebooks": 1},
    "musicgen_melody": {
        "config": "MusicgenMelodyDecoderConfig",
        "model": "MusicgenMelodyForCausalLM",
        "num_codebooks": 1,
    },
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "nemotron_h": {"n_groups": 1},
    "prophetnet": {"num_hidden_layers": ...},
    "qwen4_exp_text": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [],
        "hc_lowrank": 16,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": (32, 32),
        "axial_pos_shape": (16, 16),
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "xlnet": {"max_position_embeddings": ...},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zaya": {"num_experts_per_tok": 1},
}
OVERRIDES["cohere_compass"] = {"text_config": OVERRIDES["cohere_compass_text"]}
OVERRIDES["qwen4_exp"] = {"text_config": OVERRIDES["qwen4_exp_text"]}
OVERRIDES |= dict.fromkeys(_MROPE_TYPES, _MROPE)
OVERRIDES |= FAMILY_OVERRIDES
