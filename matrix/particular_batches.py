"""Batches to train with, for types that take more than tokens, a mask and one picture for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["PARTICULAR_BATCHES"]

_Batch = dict[str, Any]
_IMAGE_TOKEN = 120


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _idefics(model: Any, batch: _Batch, generator: torch.Generator) -> _Batch:
    """Layers that look at one picture, and every token sees it."""
    rows, length = batch["input_ids"].shape
    picture = _random((rows, 1, 5, model.config.vision_config.embed_dim), generator)
    seen = torch.ones((rows, length, 1), dtype=torch.int64)
    return {**batch, "image_encoder_embeddings": picture, "image_attention_mask": seen}


def _kosmos_2(model: Any, batch: _Batch, generator: torch.Generator) -> _Batch:
    """A picture in the place of two tokens."""
    rows, length = batch["input_ids"].shape
    picture = _random((rows, 2, model.config.text_config.embed_dim), generator)
    place = torch.zeros((rows, length), dtype=torch.bool)
    place[:, 4:6] = True
    return {**batch, "image_embeds": picture, "image_embeds_position_mask": place}


def _query_former(model: Any, batch: _Batch, generator: torch.Generator) -> _Batch:
    """Queries about a picture, or about each picture of a film, are what stands in the prompt."""
    rows, queries = batch["input_ids"].shape[0], model.config.num_query_tokens
    size, is_film = model.config.vision_config.image_size, "video" in model.config.model_type
    pictures = 4 if is_film else 1
    shape = (rows, 4, 3, size, size) if is_film else (rows, 3, size, size)
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    places = tokens.new_full((rows, pictures * queries), _IMAGE_TOKEN)
    made = {
        "input_ids": torch.cat([tokens[:, :3], places, tokens[:, 3:]], 1),
        "attention_mask": torch.cat([mask[:, :3], torch.ones_like(places), mask[:, 3:]], 1),
        "pixel_values": _random(shape, generator),
    }
    if "instruct" in model.config.model_type:
        made["qformer_input_ids"] = torch.randint(4, 100, (rows, 5), generator=generator)
        made["qformer_attention_mask"] = torch.ones_like(made["qformer_input_ids"])
    return made


def _udop(model: Any, batch: _Batch, generator: torch.Generator) -> _Batch:
    """A box on the page for every word."""
    corners = torch.rand((*batch["input_ids"].shape, 4), generator=generator)
    return {**batch, "bbox": corners.sort(-1).values}


def _dia(model: Any, batch: _Batch, generator: torch.Generator) -> _Batch:
    """One code for each channel and step; the encoder reads bytes."""
    config = model.config
    rows = batch["input_ids"].shape[0]
    codes = torch.randint(4, 100, (rows, 8, config.decoder_config.num_channels), generator=generator)
    return {**batch, "decoder_input_ids": codes}


def _voxtral_realtime(model: Any, batch: _Batch, generator: torch.Generator) -> _Batch:
    """Sound next to every token."""
    rows, length = batch["input_ids"].shape
    shape = (rows, model.config.downsample_factor * length, model.config.audio_config.hidden_size)
    return {**batch, "encoder_inputs_embeds": _random(shape, generator)}


def _pi0(model: Any, batch: _Batch, generator: torch.Generator) -> _Batch:
    """What a robot sees and where it stands; noise and time are given, as the model would draw them."""
    config, rows = model.config, batch["input_ids"].shape[0]
    size = config.vlm_config.vision_config.image_size
    tokens, mask = batch["input_ids"], torch.ones_like(batch["attention_mask"])
    places = tokens.new_full((rows, (size // config.vlm_config.vision_config.patch_size) ** 2), _IMAGE_TOKEN)
    return {
        "input_ids": torch.cat([places, tokens], 1),
        "attention_mask": torch.cat([torch.ones_like(places), mask], 1),
        "pixel_values": _random((rows, 1, 3, size, size), generator),
        "pixel_attention_mask": torch.ones((rows, 1), dtype=torch.bool),
        "state": _random((rows, config.max_state_dim), generator),
        "noise": _random((rows, config.chunk_size, config.max_action_dim), generator),
        "timestep": torch.rand((rows,), generator=generator),
    }


# model type -> what a batch of tokens and mask becomes
PARTICULAR_BATCHES: dict[str, Callable[[Any, _Batch, torch.Generator], _Batch]] = {
    "blip-2": _query_former,
    "dia": _dia,
    "idefics": _idefics,
    "instructblip": _query_former,
    "instructblipvideo": _query_former,
    "kosmos-2": _kosmos_2,
    "pi0": _pi0,
    "udop": _udop,
    "voxtral_realtime": _voxtral_realtime,
}
