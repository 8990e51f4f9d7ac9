"""What makes the configurations of heads over pictures small that are made of a backbone and parts around it."""

from __future__ import annotations

from typing import Any

__all__ = ["PICTURES"]

Fields = dict[str, Any]

_SWIN: Fields = {
    "model_type": "swin",
    "embed_dim": 8,
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 2, 4],
    "window_size": 2,
    "image_size": 64,
}
_STAGES = ["stage1", "stage2", "stage3", "stage4"]
_VIT: Fields = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "out_features": ["stage1", "stage2"],
}
# detectors whose first layer reads what a transformer returns
_WINDOWS: Fields = {
    "d_model": 32,
    "decoder_ffn_dim": 32,
    "decoder_layers": 2,
    "decoder_self_attention_heads": 4,
    "decoder_cross_attention_heads": 4,
    "num_queries": 6,
    "group_detr": 1,
}
_GROUNDED: Fields = {
    "backbone_config": {**_SWIN, "out_features": _STAGES[1:]},
    "num_queries": 6,
    "encoder_layers": 1,
    "encoder_ffn_dim": 32,
    "encoder_attention_heads": 4,
    "decoder_layers": 2,
    "decoder_ffn_dim": 32,
    "decoder_attention_heads": 4,
    "d_model": 32,
    "max_text_len": 16,
    "text_config": {"vocab_size": 128},  # two numbers below are tokens that end a phrase
    "disable_custom_kernels": True,
    "num_labels": 2,  # phrases of the texts
}
_MASKS: Fields = {
    "backbone_config": {**_SWIN, "out_features": _STAGES},
    "feature_size": 32,
    "mask_feature_size": 32,
    "hidden_dim": 32,
    "encoder_feedforward_dim": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "dim_feedforward": 32,
    "num_queries": 6,
    "train_num_points": 32,
}
_DENSE: Fields = {
    "backbone_config": {
        "model_type": "tipsv2_vision_model",
        **_VIT,
        "image_size": 28,
        "patch_size": 14,
        "reshape_hidden_states": False,
    },
    "neck_hidden_sizes": [16, 16],
    "fusion_hidden_size": 16,
    "reassemble_factors": [2, 1],
    "num_depth_bins": 8,
}

_FILMS: Fields = {"image_size": 36, "num_frames": 4, "tubelet_size": [1, 18, 18]}

PICTURES: dict[str, Fields] = {
    "maskformer": {
        "backbone_config": {**_SWIN, "out_features": _STAGES},
        "fpn_feature_size": 32,
        "mask_feature_size": 32,
    },
    "mask2former": _MASKS,
    **dict.fromkeys(("grounding-dino", "mm-grounding-dino"), _GROUNDED),
    "lw_detr": {
        **_WINDOWS,
        "backbone_config": {
            "model_type": "lw_detr_vit",
            **_VIT,
            "image_size": 64,
            "pretrain_image_size": 64,
            "patch_size": 8,
            "num_windows": 4,
            "window_block_indices": [0],
        },
        "projector_scale_factors": [1.0],
        "projector_in_channels": [32, 32],
        "projector_out_channels": 32,
    },
    "rf_detr": {
        **_WINDOWS,
        "backbone_config": {
            "model_type": "rf_detr_dinov2",
            **_VIT,
            "image_size": 56,
            "patch_size": 14,
            "num_windows": 2,
        },
        "projector_out_channels": 32,
        "intermediate_size": 32,
    },
    "tipsv2_dpt": _DENSE,
    "zoedepth": {
        "backbone_config": {
            "model_type": "beit",
            **_VIT,
            "num_hidden_layers": 4,
            "out_features": _STAGES,
            "image_size": 32,
            "patch_size": 8,
            "reshape_hidden_states": False,
        },
        "neck_hidden_sizes": [8, 8, 16, 16],
        "fusion_hidden_size": 16,
        "reassemble_factors": [4, 2, 1, 0.5],
        "num_attractors": [2, 2, 1, 1],
        "bottleneck_features": 16,
        "bin_embedding_dim": 8,
        "num_relative_features": 8,
    },
    "sapiens2": {
        "head_config": {
            "model_type": "sapiens2_head",
            "upsample_out_channels": [16],
            "conv_out_channels": [16],
            "scale_conv_out_channels": [8],
            "scale_final_hidden_sizes": [8, 8],
        },
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_attention_heads": 4,
        "num_key_value_heads_per_layer": [4, 4],
        "image_size": 32,
        "patch_size": 8,
    },
    "vitpose": {
        "backbone_config": {
            "model_type": "vitpose_backbone",
            **_VIT,
            "image_size": [64, 48],
            "patch_size": [16, 16],
            "out_features": ["stage2"],
        }
    },
    "vitmatte": {
        "backbone_config": {
            "model_type": "vitdet",
            **_VIT,
            "image_size": 32,
            "patch_size": 16,
            "num_channels": 4,
            "out_features": ["stage2"],
        },
        "hidden_size": 32,
        "convstream_hidden_sizes": [8, 8, 16],
        "fusion_hidden_sizes": [16, 8, 8, 8],
    },
    "hiera": {
        "image_size": [32, 32],
        "patch_size": [7, 7],
        "patch_stride": [4, 4],
        "patch_padding": [3, 3],
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "masked_unit_size": [4, 4],
        "num_query_pool": 1,
        "decoder_hidden_size": 16,
        "decoder_depth": 1,
        "decoder_num_heads": 2,
    },
    "vivit": {"image_size": 32, "num_frames": 4, "tubelet_size": [2, 16, 16]},
    "vjepa2": {"crop_size": 32, "patch_size": 16, "frames_per_clip": 4, "hidden_size": 48, "num_attention_heads": 4},
    "videoprism_vision_model": _FILMS,
    "videoprism": {"vision_config": _FILMS},
    "owlvit": {"projection_dim": 64},
    "owlv2": {"projection_dim": 64},
}
