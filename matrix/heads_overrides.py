"""What makes the configurations of heads small, next to `overrides`: by model type, or by class.

`...` as a value keeps a field from being set.
"""

from __future__ import annotations

from typing import Any

from .heads_pictures import PICTURES

__all__ = ["HEADS"]

Fields = dict[str, Any]

# two convolutions for a second of sound, instead of seven wide ones
_SOUND: Fields = {
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 32,
    "hidden_size": 32,
    "output_hidden_size": 32,
    "intermediate_size": 48,
    "num_codevectors_per_group": 8,
    "codevector_dim": 16,
    "proj_codevector_dim": 16,
    "num_negatives": 4,
}
_SPEAKERS: Fields = {
    "tdnn_dim": [16, 16, 16],
    "tdnn_kernel": [3, 1, 1],
    "tdnn_dilation": [1, 1, 1],
    "xvector_output_dim": 16,
    "classifier_proj_size": 16,
}
_SOUND_BERT: Fields = {"hidden_size": 32, "vocab_size": 32, "output_hidden_size": 32, **_SPEAKERS}
_SWIN: Fields = {
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 2,
    "image_size": 32,
    "patch_size": 4,
    "num_hidden_layers": ...,
    "hidden_size": ...,
    "num_layers": ...,
    "encoder_stride": 8,
}
_PYRAMID: Fields = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
}
_CONVNEXT: Fields = {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1], "image_size": 32, "patch_size": 4}
_RESNET: Fields = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
_NECK: Fields = {"reassemble_factors": [2, 1], "neck_hidden_sizes": [16, 16], "fusion_hidden_size": 16}
_DINO: Fields = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "mlp_ratio": 2,
    "out_features": ["stage1", "stage2"],
    "reshape_hidden_states": False,
    "apply_layernorm": True,
}
_DEPTH: Fields = {**_NECK, "reassemble_hidden_size": 32, "head_hidden_size": 8, "backbone_config": _DINO}
_DETR: Fields = {
    "backbone_config": {
        "model_type": "rt_detr_resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 16, 24, 32],
        "depths": [1, 1, 1, 1],
        "layer_type": "basic",
        "out_features": ["stage2", "stage3", "stage4"],
    },
    "encoder_in_channels": [16, 24, 32],
    "encoder_layers": 1,
    "encoder_hidden_dim": 32,
    "encoder_ffn_dim": 32,
    "encoder_attention_heads": 4,
    "d_model": 32,
    "decoder_in_channels": [32, 32, 32],
    "decoder_ffn_dim": 32,
    "decoder_attention_heads": 4,
    "num_queries": 8,
    "decoder_layers": 2,
    "num_denoising": 0,  # noise that is drawn
}
_DETR_OLD: Fields = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1],
        "layer_type": "basic",
        "out_features": ["stage2", "stage3", "stage4"],
    },
    "d_model": 32,
    "hidden_size": 32,
    "num_queries": 6,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_feature_levels": 3,
}
_BEIT: Fields = {
    "num_hidden_layers": 4,
    "out_indices": [1, 2, 3, 4],
    "pool_scales": [1],
    "image_size": 32,
    "patch_size": 8,
}
_SEAMLESS: Fields = {
    "t2u_vocab_size": 64,
    "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": 4,
    "speech_encoder_intermediate_size": 32,
    "feature_projection_input_dim": 16,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "conv_depthwise_kernel_size": 3,
    "max_source_positions": 64,
    "t2u_encoder_layers": 1,
    "t2u_decoder_layers": 1,
    "t2u_encoder_ffn_dim": 32,
    "t2u_decoder_ffn_dim": 32,
    "upsample_initial_channel": 32,
    "unit_embed_dim": 16,
    "unit_hifi_gan_vocab_size": 64,
    "lang_embed_dim": 8,
    "spkr_embed_dim": 8,
}
_PERCEIVER: Fields = {
    "d_latents": 16,
    "d_model": 16,
    "num_latents": 8,
    "num_blocks": 1,
    "num_self_attends_per_block": 2,
    "num_self_attention_heads": 1,
    "num_cross_attention_heads": 1,
    "train_size": [16, 24],
    "image_size": 28,
}

_EFFICIENT: Fields = {
    "image_size": 32,
    "width_coefficient": 1.0,
    "depth_coefficient": 1.0,
    "kernel_sizes": [3, 3],
    "in_channels": [32, 16],
    "out_channels": [16, 24],
    "strides": [1, 2],
    "num_block_repeats": [1, 1],
    "expand_ratios": [1, 2],
    "hidden_dim": 1280,
}

HEADS: dict[str, Fields] = {
    **PICTURES,
    **{key: {**_SOUND, **_SPEAKERS} for key in ("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat")},
    "wav2vec2-conformer": {**_SOUND, **_SPEAKERS, "position_embeddings_type": None, "conv_depthwise_kernel_size": 3},
    "data2vec-audio": {**_SOUND, **_SPEAKERS, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5},
    "sew": _SOUND,
    "sew-d": {**_SOUND, "position_buckets": 8},
    "wav2vec2-bert": _SOUND_BERT,
    **dict.fromkeys(("BeitForSemanticSegmentation", "Data2VecVisionForSemanticSegmentation"), _BEIT),
    **dict.fromkeys(("detr", "conditional_detr", "deformable_detr", "dab-detr", "table-transformer"), _DETR_OLD),
    # what its head adds to the sides of its map has to be divisible by eight
    "DetrForSegmentation": {**_DETR_OLD, "num_attention_heads": 8, "encoder_attention_heads": 8},
    "align": {"vision_config": _EFFICIENT, "projection_dim": 24},
    "led": {"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "pegasus_x": {"block_size": 4, "num_global_tokens": 2},
    "upernet": {
        "backbone_config": {
            "model_type": "resnet",
            "embedding_size": 8,
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "layer_type": "basic",
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
        "hidden_size": 16,
        "auxiliary_in_channels": 16,
        "auxiliary_channels": 8,
        "pool_scales": [1, 2],
    },
    "bit": {**_RESNET, "layer_type": "preactivation", "num_groups": 4},
    **dict.fromkeys(("convnext", "convnextv2"), _CONVNEXT),
    "cvt": {
        "depth": [1, 2, 3],  # a stage reads the rate of its own number
        "embed_dim": [16, 16, 32],
        "num_heads": [1, 1, 2],
        "drop_path_rate": [0.0, 0.0, 0.0],
    },
    "deit": {"encoder_stride": 14},
    **dict.fromkeys(("donut-swin", "swin", "swinv2"), _SWIN),
    "dpt": {**_NECK, "is_hybrid": False, "backbone_out_indices": [0, 1], "patch_size": 14},
    **dict.fromkeys(("depth_anything", "prompt_depth_anything"), _DEPTH),
    "efficientnet": _EFFICIENT,
    "esm": {"vocab_size": 64, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4},
    "focalnet": {
        "embed_dim": 16,
        "hidden_sizes": [16, 32],
        "depths": [1, 1],
        "focal_levels": [1, 1],
        "focal_windows": [3, 3],
        "image_size": 32,
        "patch_size": 4,
        "encoder_stride": 8,
        "out_features": ...,
    },
    "funnel": {
        "block_sizes": [1, 2],
        "num_hidden_layers": ...,
        "num_blocks": ...,
        "d_model": 64,
        "n_head": 4,
        "d_head": 16,
    },
    "glpn": _PYRAMID,
    "hgnet_v2": {
        "embedding_size": 16,
        "depths": [1, 1],
        "hidden_sizes": [16, 32],
        "stem_channels": [3, 8, 16],
        "stage_in_channels": [16, 16],
        "stage_mid_channels": [8, 8],
        "stage_out_channels": [16, 32],
        "stage_num_blocks": [1, 1],
        "stage_downsample": [False, True],
        "stage_downsample_strides": [2, 2],
        "stage_light_block": [False, True],
        "stage_kernel_size": [3, 3],
        "stage_numb_of_layers": [2, 2],
    },
    "levit": {
        "image_size": 64,
        "hidden_sizes": [16, 32, 48],
        "num_attention_heads": [2, 4, 4],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
    },
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16, "hidden_size": 64, "input_size": 28, "patch_size": 14},
    "lilt": {"hidden_size": 96, "num_attention_heads": 4},
    "longformer": {"attention_window": 4, "sep_token_id": 2},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 16, "vocab_size": 128},
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "MobileBertForMaskedLM": {"embedding_size": 32, "hidden_size": 64},
    "mobilevitv2": {
        "image_size": 64,
        "n_attn_blocks": [1, 1, 1],
        "base_attn_unit_dims": [16, 16, 16],
        "width_multiplier": 0.25,
        "patch_size": 2,
    },
    "mobilevit": {
        "hidden_sizes": [16, 16, 16],
        "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
        "image_size": 64,
        "patch_size": 2,
        "aspp_out_channels": 16,
    },
    "patchtst": {
        "norm_type": "layernorm",
        "num_targets": 3,
        "patch_length": 4,
        "patch_stride": 4,
        "distribution_output": "normal",
    },
    "perceiver": _PERCEIVER,
    "poolformer": {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "hidden_sizes": [16, 32],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "padding": [2, 1],
    },
    "pvt": {
        **_PYRAMID,
        "sequence_reduction_ratios": [2, 1],
        "patch_sizes": [4, 2],
        "image_size": 32,
        "sr_ratios": ...,
        "decoder_hidden_size": ...,
    },
    "pvt_v2": {**_PYRAMID, "image_size": 32, "decoder_hidden_size": ...},
    "ReformerForMaskedLM": {"is_decoder": False},
    "regnet": {**_RESNET, "groups_width": 8, "layer_type": "y"},
    "resnet": _RESNET,
    **dict.fromkeys(("rt_detr", "rt_detr_v2", "d_fine", "deimv2"), _DETR),
    "segformer": _PYRAMID,
    **dict.fromkeys(("seamless_m4t", "seamless_m4t_v2"), _SEAMLESS),
    "squeezebert": {"embedding_size": 64},
    "swiftformer": {
        "depths": [1, 1],
        "embed_dims": [16, 32],
        "downsamples": [True, True],
        "image_size": 32,
        "num_hidden_layers": ...,
    },
    "swin2sr": {**_SWIN, "image_size": 16, "patch_size": 1, "encoder_stride": ...},
    "textnet": {
        "image_size": 32,
        "stem_out_channels": 8,
        "conv_layer_kernel_sizes": [[[3, 3]], [[3, 3], [1, 3]]],
        "conv_layer_strides": [[1], [2, 1]],
        "hidden_sizes": [8, 8, 16],
    },
    "timesfm2_5": {
        "patch_length": 8,
        "context_length": 32,
        "horizon_length": 8,
        "hidden_size": 32,
        "num_key_value_heads": 4,
        "output_quantile_len": 16,
        "head_dim": 8,
    },
    "vit": {"encoder_stride": 14},
    "yolos": {"image_size": [28, 28], "num_detection_tokens": 4},
}
