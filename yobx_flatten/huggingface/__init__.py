"""Flatten KV caches and outputs of Hugging Face models, and make the models traceable."""

from __future__ import annotations

from .builders import make_dynamic_cache, make_encoder_decoder_cache, make_static_cache
from .cases import DecodeSizes, decode_inputs
from .outputs import flatten_base_model_output, flatten_with_keys_base_model_output, unflatten_base_model_output
from .recipes import (
    WRONG_REGISTRATIONS,
    flatten_dynamic_cache,
    flatten_encoder_decoder_cache,
    flatten_static_cache,
    flatten_with_keys_dynamic_cache,
    flatten_with_keys_encoder_decoder_cache,
    flatten_with_keys_static_cache,
    unflatten_dynamic_cache,
    unflatten_encoder_decoder_cache,
    unflatten_static_cache,
)

__all__ = [
    "WRONG_REGISTRATIONS", "DecodeSizes", "decode_inputs", "flatten_base_model_output", "flatten_dynamic_cache",
    "flatten_encoder_decoder_cache", "flatten_static_cache", "flatten_with_keys_base_model_output",
    "flatten_with_keys_dynamic_cache", "flatten_with_keys_encoder_decoder_cache", "flatten_with_keys_static_cache",
    "make_dynamic_cache", "make_encoder_decoder_cache", "make_static_cache", "unflatten_base_model_output",
    "unflatten_dynamic_cache", "unflatten_encoder_decoder_cache", "unflatten_static_cache",
]  # fmt: skip
