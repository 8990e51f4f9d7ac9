"""Make a small model with random weights for the name of a configuration, to try an export offline."""

from __future__ import annotations

import difflib
from typing import Any

import torch

from ...errors import InvalidArgumentError
from ...errors.failures import raised_as
from .classes import class_for

WINDOW = 8

# ByT5's vocabulary: three special tokens, then one per byte. So there is a tokenizer for every small model.
_VOCABULARY = {
    "vocab_size": 259,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "decoder_start_token_id": 0,
    "image_token_id": 3,
    "image_token_index": 3,
    "video_token_id": 258,  # the last byte, which no text holds
}
# Whatever a configuration calls its sizes; each takes those that it has.
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 512,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "max_source_positions": 50,
    "max_target_positions": 128,
    "num_mel_bins": 16,
    "image_size": 32,
    "patch_size": 8,
    "projection_dim": 64,
    "mm_tokens_per_image": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    # which layers have attention, and which have experts
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "attn_layer_indices": [1],
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    # states; heads times their size is twice the width
    "state_size": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    # wider than for training: the tokens of an untrained model then differ from each other
    "initializer_range": 0.3,
}
# Lists of tokens of the large vocabulary.
_DROPPED = ("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids")


def small_config(name: str) -> Any:
    """Make a configuration of small sizes."""
    # name: the type of a model in transformers: `llama`, `gemma3_text`, `t5`
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        close = difflib.get_close_matches(name, list(CONFIG_MAPPING.keys()), n=3, cutoff=0.72)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise InvalidArgumentError(f"{name!r} is neither a folder nor a type of model that transformers has.{hint}")

    def refused(error: BaseException) -> InvalidArgumentError:
        # where a field is checked, the second line states why
        lines = [line.strip() for line in str(error).splitlines() if line.strip()][:2] or [type(error).__name__]
        return InvalidArgumentError(
            f"A small {name} cannot be made: {' '.join(lines).rstrip('.:')}. Name a folder or a config.json instead."
        )

    with raised_as(refused):  # each configuration checks its sizes in its own way
        return _shrunk(CONFIG_MAPPING[name])


def _shrunk(config_class: Any) -> Any:
    default = config_class()
    options = {name: size for name, size in {**_SIZES, **_VOCABULARY}.items() if _may_be_set(default, name)}
    for name in _DROPPED:
        if getattr(default, name, None):
            options[name] = None
    if getattr(default, "sliding_window", None):
        options["sliding_window"] = WINDOW
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or []))
    if kinds and _may_be_set(default, "layer_types"):
        options["num_hidden_layers"] = max(2, len(kinds))
        options["layer_types"] = [kinds[index % len(kinds)] for index in range(options["num_hidden_layers"])]
    if {"num_heads", "head_dim"} <= options.keys() and hasattr(default, "expand"):  # Mamba 2
        options |= {"head_dim": default.expand * _SIZES["hidden_size"] // _SIZES["num_heads"], "n_groups": 1}
    if hasattr(default, "spatial_merge_size"):  # vision encoders of pictures of any size
        sizes = {
            "embed_dim": 64,
            "out_hidden_size": 64,
            "window_size": 32,
            "fullatt_block_indexes": [1],
            "deepstack_visual_indexes": [0, 1],
            "initializer_range": 0.1,  # features that are no larger than embeddings
        }
        options |= {name: size for name, size in sizes.items() if _may_be_set(default, name)}
    for name in getattr(default, "sub_configs", {}):
        below = getattr(default, name, None)
        if below is not None:
            options[name] = _shrunk(type(below))
    config = config_class(**options)
    if "mrope_section" in getattr(config_class, "ignore_keys_at_rope_validation", ()):
        config.rope_parameters["mrope_section"] = [2, 3, 3]  # time, height and width share half of a head
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = _VOCABULARY["decoder_start_token_id"]  # T5's class has no value for it
    return config


def _may_be_set(config: Any, name: str) -> bool:
    """Return whether a configuration has an entry that it does not work out from others."""
    found = getattr(type(config), getattr(config, "attribute_map", {}).get(name, name), None)
    return hasattr(config, name) and not (isinstance(found, property) and found.fset is None)


def small_model(name: str, seed: int = 0) -> Any:
    """Make a small model with random weights, in evaluation mode."""
    config = small_config(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return class_for(config)(config).eval()
