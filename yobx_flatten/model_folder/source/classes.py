"""Choose the transformers class for a configuration, and find the model inside of a wrapper."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import InvalidArgumentError
from ...errors.failures import raised_as
from ..pieces.tasks import AUTO_CLASSES

# in order of priority: the first auto class that has a class for a configuration is chosen
_AUTO_CLASSES = (
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",  # before AutoModelForCausalLM, which also has classes for encoders
    "AutoModelForCausalLM",
    "AutoModel",
)
# tasks whose classes are not all listed in transformers' auto classes
_KEPT = {
    "text-generation",
    "text2text-generation",
    "automatic-speech-recognition",
    "image-text-to-text",
    "feature-extraction",
}
_HEAD = re.compile(r"For[A-Z]|LMHeadModel$")


def class_for(config: Any) -> Any:
    """Return a model's class, from ``config.architectures`` or from the first auto class that has a class."""
    import transformers

    for name in getattr(config, "architectures", None) or []:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    found = next((kind for name in _AUTO_CLASSES if (kind := _of_kind(name, config)) is not None), None)
    if found is not None:
        return found
    raise InvalidArgumentError(f"transformers has no model for a {type(config).__qualname__}.")


def task_of_checkpoint(task: str, architectures: Sequence[str] | None) -> str:
    """Return the requested task; for ``"auto"`` and a class for pretraining, the task of the model without a head."""
    stated = str(next(iter(architectures or ()), ""))
    return "feature-extraction" if task == "auto" and stated.endswith("ForPreTraining") else task


def classes_of_task(config: Any, task: str) -> list[Any]:
    """Return the transformers classes that read a configuration and are for a task."""
    kinds = [kind for name in AUTO_CLASSES.get(task, ()) if (kind := _of_kind(name, config)) is not None]
    return [one for kind in kinds for one in (kind if isinstance(kind, tuple) else (kind,))]


def class_of_task(config: Any, task: str, own: Any) -> Any:
    """Return the class for a task: the model's own class if it fits, or if transformers has no other."""
    flat = classes_of_task(config, task)
    # A class without a head, such as DPRContextEncoder, stays: its AutoModel may be another part of the model. A class
    # with a head stays only for tasks that this head is for.
    stays = (task == "feature-extraction") != bool(_HEAD.search(own.__name__)) and task in _KEPT
    return own if own in flat or stays or not flat else flat[0]


def architecture_of_task(config: Any, task: str, *, runs_code: bool) -> str:
    """Return the name of the class for a task; the class may be in Python files in the folder of the configuration."""
    if not runs_code:
        return str(class_of_task(config, task, class_for(config)).__name__)
    named: Mapping[str, str] = getattr(config, "auto_map", None) or {}
    wanted = [str(named[name]).rpartition(".")[2] for name in AUTO_CLASSES.get(task, ()) if name in named]
    stated = list(getattr(config, "architectures", None) or [])
    return wanted[0] if wanted and not {*wanted} & {*stated} else "".join(stated[:1])


def base_class_for(config: Any) -> Any:
    """Return the class of a model without a head, as ``AutoModel`` makes it; else the result of :func:`class_for`."""
    found = _of_kind("AutoModel", config)
    return class_for(config) if found is None or isinstance(found, tuple) else found


def _of_kind(name: str, config: Any) -> Any:
    """Return the class of a configuration in one of transformers' auto classes; ``None`` if it has none."""
    import transformers

    auto, kind = getattr(transformers, name, None), type(config)
    if auto is None or getattr(transformers, kind.__name__, kind) is not kind:  # a foreign class with the same name
        return None
    with contextlib.suppress(KeyError):  # a lookup imports one model, a list of the keys all models
        return auto._model_mapping[kind]
    return None


def without_peft(model: Any) -> Any:
    """Return the Hugging Face model in a ``PeftModel``, with its adapters; return any other model unchanged."""
    configs = getattr(model, "peft_config", None)
    if not configs or not hasattr(model, "get_base_model"):
        return model
    if any(getattr(config, "is_prompt_learning", False) for config in configs.values()):
        raise InvalidArgumentError(
            f"A {type(model).__qualname__} has learned prompts (prompt tuning), which exported files do not support. "
            "Adapters inside layers, such as LoRA, are exported."
        )
    return model.get_base_model()


WINDOW = 8

# ByT5's vocabulary: three special tokens, then one token per byte. Every small model can use ByT5's tokenizer.
_VOCABULARY = {
    "vocab_size": 259,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "decoder_start_token_id": 0,
    "image_token_id": 3,
    "image_token_index": 3,
    "video_token_id": 258,  # byte 255, which UTF-8 never contains
}
# Names of sizes in all configurations; a configuration gets the entries that it has.
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
    # larger than for training, so that the untrained model generates different tokens
    "initializer_range": 0.3,
}
# Lists of tokens that are not in the small vocabulary.
_DROPPED = ("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids")


def small_config(name: str) -> Any:
    """Make a configuration with small sizes for a transformers model type such as ``llama`` or ``t5``."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        close = difflib.get_close_matches(name, list(CONFIG_MAPPING.keys()), n=3, cutoff=0.72)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise InvalidArgumentError(f"{name!r} is neither a folder nor a type of model that transformers has.{hint}")

    def refused(error: BaseException) -> InvalidArgumentError:
        # the message of a failed check has its reason in the second line
        lines = [line.strip() for line in str(error).splitlines() if line.strip()][:2] or [type(error).__name__]
        return InvalidArgumentError(
            f"A small {name} cannot be made: {' '.join(lines).rstrip('.:')}. Name a folder or a config.json instead."
        )

    with raised_as(refused):  # each configuration raises its own errors
        return _shrunk(CONFIG_MAPPING[name])


def _shrunk(config_class: Any) -> Any:
    default = config_class()
    options = {name: size for name, size in {**_SIZES, **_VOCABULARY}.items() if _may_be_set(default, name, size)}
    for name in _DROPPED:
        if getattr(default, name, None):
            options[name] = None
    if getattr(default, "sliding_window", None):
        options["sliding_window"] = WINDOW
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or []))
    if kinds and _may_be_set(default, "layer_types", kinds):
        options["num_hidden_layers"] = max(2, len(kinds))
        options["layer_types"] = [kinds[index % len(kinds)] for index in range(options["num_hidden_layers"])]
    if {"num_heads", "head_dim"} <= options.keys() and hasattr(default, "expand"):  # Mamba 2
        options |= {"head_dim": default.expand * _SIZES["hidden_size"] // _SIZES["num_heads"], "n_groups": 1}
    if hasattr(default, "spatial_merge_size"):  # vision encoders of pictures of any size
        sizes: dict[str, Any] = {"embed_dim": 64, "out_hidden_size": 64, "window_size": 32, "initializer_range": 0.1}
        sizes |= {"fullatt_block_indexes": [1], "deepstack_visual_indexes": [0, 1]}
        options |= {name: size for name, size in sizes.items() if _may_be_set(default, name, size)}
    if isinstance(getattr(default, "depths", 0), list | tuple) and hasattr(default, "window_size"):  # Swin
        options |= {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 32, "window_size": 2}
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


def _may_be_set(config: Any, name: str, value: object) -> bool:
    """Return whether a configuration has an entry that can be set, with a list of values only if it has a list."""
    found = getattr(type(config), getattr(config, "attribute_map", {}).get(name, name), None)
    if isinstance(getattr(config, name, None), list | tuple) and not isinstance(value, list):
        return False  # a number for each stage of an encoder of images
    return hasattr(config, name) and not (isinstance(found, property) and found.fset is None)


def small_model(name: str, seed: int = 0) -> Any:
    """Make a small model with random weights, in evaluation mode."""
    config = small_config(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return class_for(config)(config).eval()
