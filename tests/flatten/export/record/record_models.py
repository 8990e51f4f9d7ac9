"""Small random models of real architectures that generate, and inputs for them of any batch and length."""

import functools
from typing import Any

import torch
import transformers

from tests.models import BART_SIZES, SIZES, T5_SIZES

__all__ = ["MODELS", "generate_inputs", "make_generator"]

_VOCABULARY, _IMAGE = 96, 5
_SIZES = {**SIZES, "vocab_size": _VOCABULARY, "num_key_value_heads": 2, "head_dim": 8}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_WINDOW = {"sliding_window": 8}
_MIXED = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

# name -> configuration, model, what the configuration is given
_CAUSAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _SIZES),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_SIZES, **_WINDOW}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_SIZES, **_MIXED, "query_pre_attn_scalar": 8}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": _VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
}
_ENCODER_DECODER: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": _VOCABULARY, **T5_SIZES, "decoder_start_token_id": 0},
    ),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {
            **BART_SIZES,
            "vocab_size": _VOCABULARY,
            "decoder_start_token_id": 1,
            "max_position_embeddings": 64,
            "forced_eos_token_id": None,
        },
    ),
}
MODELS = [*_CAUSAL, *_ENCODER_DECODER, "gemma3_vision"]


@functools.cache
def make_generator(name: str) -> Any:
    if name == "gemma3_vision":
        config = transformers.Gemma3Config(
            text_config=transformers.Gemma3TextConfig(**_SIZES, **_MIXED, **_TOKENS, query_pre_attn_scalar=8),
            vision_config=transformers.SiglipVisionConfig(**{**SIZES, "image_size": 16, "patch_size": 4}),
            mm_tokens_per_image=4,
            image_token_index=_IMAGE,
            boi_token_index=6,
            eoi_token_index=7,
        )
        model_class = transformers.Gemma3ForConditionalGeneration
    else:
        config_name, model_name, options = {**_CAUSAL, **_ENCODER_DECODER}[name]
        config = getattr(transformers, config_name)(**{**_TOKENS, **options})
        model_class = getattr(transformers, model_name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.max_length = None
    return model


def generate_inputs(name: str, *, batch: int = 2, length: int = 8, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(8, _VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(tokens)
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if name == "gemma3_vision":
        tokens[:, 0], tokens[:, 1:5], tokens[:, 5] = 6, _IMAGE, 7
        inputs["token_type_ids"] = (tokens == _IMAGE).long()
        inputs["pixel_values"] = torch.randn(batch, 3, 16, 16, generator=generator)
    elif name in _ENCODER_DECODER:
        mask[0, -2:] = 0
    elif name != "mamba":
        mask[0, :2] = 0
    return inputs
