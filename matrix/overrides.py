"""What makes a configuration small: numbers by the name of the field, then what is particular to a type."""

from __future__ import annotations

from typing import Any

__all__ = ["ADJUSTMENTS", "OVERRIDES", "SIZES", "WINDOW_FIELDS"]

WINDOW_FIELDS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size")

SIZES: dict[str, Any] = {
    # width
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_dim", "embed_dim", "lru_width", "dim"), 64),
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
    "index_n_heads": 4,
    "index_topk": 8,
    # vocabulary and positions
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"), 256),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "attention_window_size"), 8),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_experts_intermediate_size"), 32),
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


def _has(name: str) -> Any:
    def applies(config: Any) -> bool:
        return getattr(config, name, None) is not None

    return applies


# Fields that only fit together: when a configuration has the first, it gets the others too.
ADJUSTMENTS: list[tuple[Any, dict[str, Any]]] = [
    # attention through a low rank: one key head per query head, the rotated part is the head size
    (_has("kv_lora_rank"), {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "head_dim": 8}),
]

_FOUR = {"num_hidden_layers": 4}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "jamba": {
        "num_hidden_layers": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "nemotron_h": {"n_groups": 1},
    "zaya": {"num_experts_per_tok": 1},
}
