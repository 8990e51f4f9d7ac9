"""What is particular to encoder-decoder, vision-language and speech types; the format is that of `overrides`."""

from __future__ import annotations

from typing import Any

__all__ = ["FAMILY_OVERRIDES"]

_CODEC = {"num_filters": 4, "depths": [1] * 7, "hidden_size": 8}
# a pyramid of convolutions, one entry per stage
_DAVIT = {
    "embed_dim": [16, 32],
    "depths": [1, 1],
    "patch_size": [7, 3],
    "patch_stride": [4, 2],
    "patch_padding": [3, 1],
    "patch_prenorm": [False, True],
    "num_heads": [2, 4],
    "num_groups": [2, 4],
    "window_size": 4,
}
# the encoder of "encoder-decoder" and its like reads, the decoder keeps a cache and looks at the encoder
_DECODER = {"is_decoder": True, "add_cross_attention": True}
_OMNI = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}

# the two layers in the middle are called twice; positions count from the eighth token on
_LOOPED_INKLING = {
    "num_hidden_layers": 4,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 3,
    "loop_num_passes": 2,
    "loop_gate_rank": 16,
    "n_layers_per_attn_res_block": 1,
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
    "swa_head_dim": 16,
    "d_rel": 4,
    "rel_extent": 12,
    "log_scaling_n_floor": 8,
}

# pictures of more than one token: the reference models take a single token of a single picture for a batch of none
_PICTURES = {"vision_config": {"image_size": 56}}
_QUERIES = {"num_query_tokens": 4, "image_token_index": 120}

# pictures and sounds are words of the vocabulary: first those of text, then 32 of pictures, then 16 of sounds
_CODES = {
    "image_token_offset": 64,
    "audio_token_offset": 96,
    "vision_config": {
        "codebook_size": 32,
        "embed_dim": 16,
        "latent_channels": 16,
        "base_channels": 32,
        "channel_multiplier": [1, 1, 1],
        "num_res_blocks": 1,
        "attn_resolutions": [7],
        "resolution": 28,
    },
    "audio_config": {
        "num_filters": 4,
        "upsampling_ratios": [4, 2],
        "hidden_size": 16,
        "codebook_dim": 16,
        "codebook_size": 16,
        "decoder_hidden_size": 32,
        "decoder_intermediate_size": 32,
        "decoder_num_layers": 1,
        "decoder_attention_num_groups": 4,
    },
}

FAMILY_OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus1p5": {**_CODES, "text_config": {"output_vocab_size": 64}},
    "blip-2": _QUERIES,
    "inkling2_loop": {
        "text_config": _LOOPED_INKLING,
        "vision_config": {"text_hidden_size": 64, "projection_hidden_dim": 96},
    },
    "inkling2_loop_text": _LOOPED_INKLING,
    "instructblip": _QUERIES,
    "instructblipvideo": {**_QUERIES, "video_token_index": 120},
    "mistral3": _PICTURES,
    "mistral_large4": _PICTURES,
    "omniasr": {
        "audio_config": {"conv_dim": [16] * 7, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
    },
    "pi0": {"vlm_config": {"projection_dim": 64, "vision_config": {"projection_dim": 64}}},
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense", "sparse"],
            "num_hidden_layers": 2,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        },
        "vision_config": {"sam_config": {"image_size": 64, "patch_size": 8, "downsample_channels": [16, 64]}},
    },
    "dia": {
        "decoder_config": {
            "cross_hidden_size": 64,
            "cross_head_dim": 16,
            "cross_num_attention_heads": 4,
            "cross_num_key_value_heads": 4,
        }
    },
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}},
    "emu3": {
        "vocabulary_map": {"<image>": 8, "<|extra_200|>": 9, "<|visual token 000000|>": 10},
        "vq_config": {"base_channels": 32, "codebook_size": 64, "channel_multiplier": [1, 1]},
    },
    "encoder-decoder": {"decoder": _DECODER},
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [32, 32],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
        }
    },
    "evolla": {"model": "EvollaForProteinText2Text"},
    "florence2": {"vision_config": _DAVIT},
    "glm5_next": {"text_config": {"index_topk": 8, "index_kpool": 4, "qk_rope_head_dim": 0, "head_dim": ...}},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2", "spatial_target_layers": [1]},
    "hy_v4_vl": {
        "text_config": {
            "num_hidden_layers": 3,  # a layer chooses what to read by itself, or as the one before it
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["indexed_attention"] * 3,
            "indexer_types": ["full", "full", "shared"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {"max_image_size": 56},
    },
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2, 2]},
        }
    },
    "janus": {"vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 32}},
    "kyutai_speech_to_text": {
        "audio_pad_token_id": 3,
        "num_codebooks": 4,
        "codebook_vocab_size": 128,
        "codec_config": {"upsample_groups": 64},
    },
    "mistral4": {"head_dim": 16},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2], "text_hidden_size": 64}},
    "moonshine_streaming": {"num_key_value_heads": 4},  # its attention takes as many heads as there are for queries
    "muse_spark": {
        "audio_config": {
            "patch_sizes": [4, 4],
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "num_hidden_layers": 2,
            "out_hidden_size": 64,
        }
    },
    "nemo_speechlm": {
        "word_timestamp_config": {"blank_token_id": 127},
        "audio_config": {"hidden_size": ..., "diarization_config": {"head_config": {"audio_hidden_size": 64}}},
        "text_config": {"n_groups": 1},
    },
    "pp_formulanet": {
        "vision_config": {
            "image_size": 64,
            "patch_size": 8,
            "post_conv_in_channels": 16,
            "post_conv_mid_channels": 16,
            "post_conv_out_channels": 64,
            "decoder_hidden_size": 64,
            "output_channels": 16,
        }
    },
    "qwen2_5_omni_thinker": {"text_config": _OMNI, "vision_start_token_id": 5},
    "qwen3_omni_moe_thinker": {"text_config": _OMNI, "vision_start_token_id": 5},
    "speech-encoder-decoder": {"decoder": _DECODER},
    "step3p7": {"text_config": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}},
    "vibevoice": {"audio_config": _CODEC, "semantic_model_config": _CODEC},
    "vibevoice_asr": {"acoustic_tokenizer_encoder_config": _CODEC, "semantic_tokenizer_encoder_config": _CODEC},
    "vision-encoder-decoder": {"decoder": _DECODER},
}
