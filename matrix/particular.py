"""Decode inputs of types that take more than tokens, a mask and a cache in every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from yobx_flatten import DecodeSizes
from yobx_flatten.huggingface.cache_names import cache_of, installed_name

__all__ = ["PARTICULAR", "NoCacheError", "carried"]

# what comes out of a call next to the cache and goes into the next one; transformers 5.24 calls the first the second
_CARRIED = ("encoder_past_key_values", "encoder_cache", "padding_cache")


class NoCacheError(ValueError):
    """The model keeps nothing between two calls, so there is nothing to flatten."""


def carried(outputs: Any) -> dict[str, Any]:
    """Return what comes out of a call next to the cache and goes into the next one, by name."""
    return {name: outputs[name] for name in _CARRIED if outputs.get(name) is not None}


def _random(model: Any, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(4, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def _dia(model: Any, sizes: DecodeSizes, seed: int) -> dict[str, Any]:
    """Speech from text: every step is one code per channel."""
    config = model.config
    source = _random(model, (sizes.batch, sizes.source), seed + 1) % config.encoder_config.vocab_size
    codes = _random(model, (sizes.batch, sizes.past + sizes.new, config.decoder_config.num_channels), seed)
    encoded = model.get_encoder()(input_ids=source)
    cache = cache_of(model(decoder_input_ids=codes[:, : sizes.past], encoder_outputs=encoded, use_cache=True))
    return {"decoder_input_ids": codes[:, sizes.past :], "encoder_outputs": encoded, installed_name(): cache}


def _kyutai(model: Any, sizes: DecodeSizes, seed: int) -> dict[str, Any]:
    """Text from speech: every step is one token of text and one code per codebook."""
    codes = _random(model, (sizes.batch, sizes.past + sizes.new, 1 + model.config.num_codebooks), seed)
    mask = torch.ones(codes.shape[:2], dtype=torch.int64)
    mask[0, : sizes.padding] = 0
    cache = model(input_ids=codes[:, : sizes.past], attention_mask=mask[:, : sizes.past], use_cache=True)
    return {
        "input_ids": codes[:, sizes.past :],
        "attention_mask": mask,
        installed_name(): cache_of(cache),
        "use_cache": True,
    }


def _voxtral_realtime(model: Any, sizes: DecodeSizes, seed: int) -> dict[str, Any]:
    """Text from speech while it is spoken: every step brings its sound, and there are two caches."""
    factor = model.config.downsample_factor
    tokens = _random(model, (sizes.batch, sizes.past + sizes.new), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    width = model.config.audio_config.hidden_size
    sound = torch.randn((sizes.batch, factor * tokens.shape[1], width), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, : sizes.padding] = 0
    past = model(
        input_ids=tokens[:, : sizes.past],
        encoder_inputs_embeds=sound[:, : factor * sizes.past],
        attention_mask=mask[:, : sizes.past],
        num_delay_tokens=1,
        use_cache=True,
    )
    return {
        "input_ids": tokens[:, sizes.past :],
        "encoder_inputs_embeds": sound[:, factor * sizes.past :],
        "attention_mask": mask,
        installed_name(): cache_of(past),
        **carried(past),
        "num_delay_tokens": 1,
        "use_cache": True,
    }


def _prompt_with(model: Any, sizes: DecodeSizes, seed: int, **media: Any) -> dict[str, Any]:
    """Tokens and a mask, and the same media in every call."""
    tokens = _random(model, (sizes.batch, sizes.past + sizes.new), seed)
    mask = torch.ones_like(tokens)
    mask[0, : sizes.padding] = 0

    def part(start: int, stop: int) -> dict[str, Any]:
        cut = {name: value[:, start:stop] if name in _PER_TOKEN else value for name, value in media.items()}
        return {"input_ids": tokens[:, start:stop], "attention_mask": mask[:, :stop], **cut}

    cache = cache_of(model(**part(0, sizes.past), use_cache=True))
    return {**part(sizes.past, sizes.past + sizes.new), installed_name(): cache, "use_cache": True}


_PER_TOKEN = ("image_attention_mask", "image_embeds_position_mask")


def _idefics(model: Any, sizes: DecodeSizes, seed: int) -> dict[str, Any]:
    """Layers that look at the picture are between those that look at the text: they need it in every step."""
    generator = torch.Generator().manual_seed(seed + 1)
    picture = torch.randn((sizes.batch, 1, 5, model.config.vision_config.embed_dim), generator=generator)
    seen = torch.ones((sizes.batch, sizes.past + sizes.new, 1), dtype=torch.int64)
    return _prompt_with(model, sizes, seed, image_encoder_embeddings=picture, image_attention_mask=seen)


def _kosmos_2(model: Any, sizes: DecodeSizes, seed: int) -> dict[str, Any]:
    """The picture replaces tokens of the prompt; later calls also take it, and put it nowhere."""
    generator = torch.Generator().manual_seed(seed + 1)
    length = min(2, sizes.past)
    picture = torch.randn((sizes.batch, length, model.config.text_config.embed_dim), generator=generator)
    place = torch.zeros((sizes.batch, sizes.past + sizes.new), dtype=torch.bool)
    place[:, :length] = True
    kwargs = _prompt_with(model, sizes, seed, image_embeds=picture, image_embeds_position_mask=place)
    return {name: value for name, value in kwargs.items() if name != "image_embeds_position_mask"}


def _prophetnet(model: Any, sizes: DecodeSizes, seed: int) -> dict[str, Any]:
    """The decoder takes one token at a time when it has a cache, also in the prefill."""
    tokens, cache = _random(model, (sizes.batch, sizes.past + 1), seed), None
    name, encoded = "input_ids", {}
    if model.config.is_encoder_decoder:  # there is a language model also of the decoder alone
        source = _random(model, (sizes.batch, sizes.source), seed + 1)
        name, encoded = "decoder_input_ids", {"encoder_outputs": model.get_encoder()(input_ids=source)}
    for step in range(sizes.past):
        call = {name: tokens[:, step : step + 1], **encoded, installed_name(): cache, "use_cache": True}
        cache = cache_of(model(**call))
    return {name: tokens[:, -1:], **encoded, installed_name(): cache}


def _udop(model: Any, sizes: DecodeSizes, seed: int) -> dict[str, Any]:
    """Text with a box on the page for every word; the decoder sees the text only."""
    source = _random(model, (sizes.batch, sizes.source), seed + 1)
    corners = torch.rand((sizes.batch, sizes.source, 4), generator=torch.Generator().manual_seed(seed + 2))
    tokens = _random(model, (sizes.batch, sizes.past + sizes.new), seed)
    encoded = model.get_encoder()(
        input_ids=source, bbox=corners.sort(-1).values, attention_mask=torch.ones_like(source)
    )
    prefill = {"encoder_outputs": encoded, "attention_mask": encoded.attention_mask}
    cache = cache_of(model(decoder_input_ids=tokens[:, : sizes.past], use_cache=True, **prefill))
    return {"decoder_input_ids": tokens[:, sizes.past :], **prefill, installed_name(): cache}


def _diffusion_gemma(model: Any, sizes: DecodeSizes, seed: int) -> dict[str, Any]:
    """Text from noise: a call takes the canvas that it makes clearer, or draws one that cannot be repeated."""
    canvas = _random(model, (sizes.batch, 6), seed + 1)
    kwargs = _prompt_with(model, sizes, seed, decoder_input_ids=canvas)
    kwargs.pop("use_cache")  # it always does, and has no parameter for it
    return kwargs


def _pi0(model: Any, sizes: DecodeSizes, seed: int) -> dict[str, Any]:
    """Moves of a robot, all at once; the cache of the prompt goes in and is not handed back."""
    raise NoCacheError(f"{type(model).__name__} returns actions, and no cache")


# model type -> how its inputs are made
PARTICULAR: dict[str, Callable[[Any, DecodeSizes, int], dict[str, Any]]] = {
    "dia": _dia,
    "diffusion_gemma": _diffusion_gemma,
    "idefics": _idefics,
    "kosmos-2": _kosmos_2,
    "kyutai_speech_to_text": _kyutai,
    "pi0": _pi0,
    "prophetnet": _prophetnet,
    "udop": _udop,
    "voxtral_realtime": _voxtral_realtime,
}
