"""Decode inputs for every family of models, and the loop that goes on from them.

The text models get theirs from `yobx_flatten.decode_inputs`; here is what that function is not for: models whose
state is not called ``past_key_values``, and encoders that read sounds.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch

from yobx_flatten import DecodeSizes, decode_inputs

__all__ = ["NoCacheError", "cache_name", "decode", "eager_loop", "go_on", "loop"]

# how models name their state, as input and as output
_CACHE_NAMES = ("past_key_values", "cache_params", "state", "past_buckets_states", "mems")


class NoCacheError(ValueError):
    """The model keeps nothing between two calls, so there is nothing to take apart."""


def cache_name(model: Any) -> str:
    """Return the name of the argument that takes the cache.

    Raises:
        NoCacheError: when the model has none of the names we know.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in _CACHE_NAMES:
        if name in parameters:
            return name
    raise NoCacheError(f"{type(model).__name__}.forward takes none of {', '.join(_CACHE_NAMES)}")


def decode(model: Any, sizes: DecodeSizes, seed: int = 0) -> dict[str, Any]:
    """Make the inputs of one decode call, with a cache filled by running the model.

    Args:
        model: a model of `models.make_model`.
        sizes: batch, tokens seen, tokens of this call, padding.
        seed: of the tokens.

    Raises:
        NoCacheError: when the model keeps no cache.
        Exception: whatever the model raises.
    """
    name = cache_name(model)
    if name != "past_key_values":
        kwargs = _state_inputs(model, sizes, seed, name)
    elif getattr(model, "main_input_name", "input_ids") in ("input_features", "input_values"):
        kwargs = _speech_inputs(model, sizes, seed)
    else:
        kwargs = _text_inputs(model, sizes, seed)
    if kwargs.get(name) is None:
        raise NoCacheError(f"{type(model).__name__} returned no {name}")
    # tokens are cut from a longer row; the strides of the cut would be part of the program in some of the ways
    return {key: value.contiguous() if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()}


def _tokens(model: Any, sizes: DecodeSizes, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (sizes.batch, sizes.past + sizes.new), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, : sizes.padding] = 0
    return tokens, mask


def _text_inputs(model: Any, sizes: DecodeSizes, seed: int) -> dict[str, Any]:
    try:
        return decode_inputs(model, sizes, seed=seed)
    except AttributeError as error:
        if error.name == "past_key_values":
            raise NoCacheError(f"{type(model).__name__} takes past_key_values, but returns none") from error
        raise


def _state_inputs(model: Any, sizes: DecodeSizes, seed: int, name: str) -> dict[str, Any]:
    """State space models go on one token at a time; several at once are a new beginning for most of them."""
    tokens, mask = _tokens(model, DecodeSizes(sizes.batch, sizes.past, 1, sizes.padding), seed)
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    prefill = {"attention_mask": mask[:, : sizes.past]} if takes_mask and sizes.padding else {}
    with torch.no_grad():
        outputs = model(input_ids=tokens[:, : sizes.past], use_cache=True, **prefill)
    return {"input_ids": tokens[:, sizes.past :], name: getattr(outputs, name, None), "use_cache": True}


def _speech_inputs(model: Any, sizes: DecodeSizes, seed: int) -> dict[str, Any]:
    config = model.config
    tokens, _ = _tokens(model, sizes, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    if model.main_input_name == "input_features":
        encoder = getattr(config, "encoder_config", None) or getattr(config, "audio_config", None) or config
        named = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
        bins = next((size for one in (encoder, config) for name in named if (size := getattr(one, name, None))), 80)
        length = 2 * getattr(encoder, "max_source_positions", 32)
        shape = (sizes.batch, bins, length) if "whisper" in config.model_type else (sizes.batch, length, bins)
    else:
        shape = (sizes.batch, 4000)
    with torch.no_grad():
        encoded = model.get_encoder()(torch.randn(shape, generator=generator))
        outputs = model(decoder_input_ids=tokens[:, : sizes.past], encoder_outputs=encoded, use_cache=True)
    return {
        "decoder_input_ids": tokens[:, sizes.past :],
        "encoder_outputs": encoded,
        "past_key_values": outputs.past_key_values,
    }


def following(kwargs: dict[str, Any], outputs: Any, tokens: torch.Tensor) -> dict[str, Any]:
    """Make the inputs of the next call: the cache that came out, these tokens, a longer mask."""
    name = next(name for name in _CACHE_NAMES if name in kwargs)
    ids, mask = ("decoder_input_ids", "decoder_attention_mask")
    if ids not in kwargs:
        ids, mask = ("input_ids", "attention_mask")
    after = {**kwargs, name: getattr(outputs, name), ids: tokens}
    if isinstance(kwargs.get(mask), torch.Tensor):
        after[mask] = torch.cat([kwargs[mask], torch.ones_like(tokens)], dim=1)
    return after


def loop(call: Callable[..., Any], kwargs: dict[str, Any], steps: int = 3, seed: int = 7) -> list[torch.Tensor]:
    """Call ``steps`` times, each time with the cache that came out of the call before; return the logits.

    The tokens of the later calls are random and the same for every ``call``, so that two loops can be compared.
    """
    kwargs, logits = copy.deepcopy(kwargs), []
    for step in range(steps):
        with torch.no_grad():
            outputs = call(**kwargs)
        logits.append(outputs.logits)
        ids = kwargs["decoder_input_ids" if "decoder_input_ids" in kwargs else "input_ids"]
        generator = torch.Generator().manual_seed(seed + step)
        tokens = torch.randint(0, outputs.logits.shape[-1], ids.shape, generator=generator)
        kwargs = following(kwargs, outputs, tokens)
    return logits


def eager_loop(model: Any, kwargs: dict[str, Any], steps: int = 3) -> list[torch.Tensor]:
    """What the model itself does in `loop`."""
    return loop(model, kwargs, steps)


def go_on(model: Any, kwargs: dict[str, Any], cache: Any, steps: int = 8) -> list[torch.Tensor]:
    """Generate greedily from a cache, which is changed, and return the logits of each step."""
    name = next(name for name in _CACHE_NAMES if name in kwargs)
    kwargs, logits = {**kwargs, name: cache}, []
    for _ in range(steps):
        with torch.no_grad():
            outputs = model(**kwargs)
        logits.append(outputs.logits)
        kwargs = following(kwargs, outputs, outputs.logits[:, -1:].argmax(-1))
    return logits
