"""What models read next to tokens: random pictures and sounds, in the shapes that each of them takes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

__all__ = [
    "IMAGE_TOKEN",
    "TOKENS_OF_MEDIA",
    "PictureEncoder",
    "encoder_inputs",
    "features_shape",
    "picture_of",
    "reads_media",
]

IMAGE_TOKEN = 120
# placeholders in the prompt; the small vocabulary ends at 128, so the defaults lie after it
TOKENS_OF_MEDIA = {
    "image_token_id": IMAGE_TOKEN,
    "image_token_index": IMAGE_TOKEN,
    "image_patch_id": IMAGE_TOKEN,
    "video_token_id": 121,
    "video_token_index": 121,
    "audio_token_id": 122,
    "audio_token_index": 122,
}
_READ_BY_ENCODERS = ("input_features", "input_values", "pixel_values", "flattened_patches", "inputs")


def reads_media(model: Any) -> bool:
    """Return whether the model's encoder reads pictures or sounds, and nothing else."""
    encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
    return encoder_decoder and getattr(model, "main_input_name", "input_ids") in _READ_BY_ENCODERS


def encoder_inputs(model: Any, batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Make what the encoder of a model reads, by the name of the argument.

    Args:
        model: one of `reads_media`.
        batch: number of rows.
        generator: the generator of the random numbers.
    """
    encoder = getattr(model, "encoder", None) or model.get_encoder()
    name = encoder.main_input_name if model.main_input_name == "inputs" else model.main_input_name
    config = model.config
    inner = getattr(config, "encoder", None) or getattr(config, "vision_config", None)
    if name == "pixel_values":
        size = _first(_read("image_size", inner, config) or 28)
        shape: tuple[int, ...] = (batch, 3, size, size)
    elif name == "flattened_patches":  # row and column of each patch come first
        shape = (batch, 9, inner.patch_embed_hidden_size + 2)
    elif name == "input_features":
        shape = features_shape(config, batch)
    else:
        shape = (batch, 4000)
    made = torch.randn(shape, generator=generator)
    if name == "flattened_patches":
        made[..., :2] = torch.cartesian_prod(torch.arange(1.0, 4.0), torch.arange(1.0, 4.0))
    return {name: made}


def features_shape(config: Any, batch: int) -> tuple[int, ...]:
    """Return the shape of the features of sounds that a model of this configuration reads."""
    encoder = _read("encoder_config", config) or _read("audio_config", config) or config
    bins = _read("num_mel_bins", encoder, config) or _read("input_feat_per_channel", encoder, config)
    bins = bins or _read("feature_projection_input_dim", encoder, config) or 80
    length = 2 * (_read("max_source_positions", encoder) or 32)
    return (batch, bins, length) if "whisper" in config.model_type else (batch, length, bins)


def _read(name: str, *configs: Any) -> Any:
    return next((value for one in configs if (value := getattr(one, name, None)) is not None), None)


def _first(size: Any) -> int:
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def picture_of(model: Any, batch: int, generator: torch.Generator) -> tuple[dict[str, Any], int] | None:
    """Make one small picture per row, in the form that this model takes.

    Args:
        model: a vision-language model.
        batch: number of rows.
        generator: the generator of the random numbers.

    Returns:
        The arguments of ``forward``, and how many tokens of the prompt stand for one picture; ``None`` when none of the
        forms we know is the model's.
    """
    if not hasattr(model, "get_image_features") or _read("image_token_id", model.config) != IMAGE_TOKEN:
        return None
    width = model.config.get_text_config(decoder=True).hidden_size
    taken = set(inspect.signature(model.forward).parameters)
    encoder = PictureEncoder(model)
    for made in _forms(model.config, batch, generator):
        if not set(made) <= taken:
            continue
        with contextlib.suppress(Exception), torch.no_grad():  # whatever a model raises for pictures of another form
            length, rest = divmod(encoder(made).numel(), width * batch)
            if rest == 0 and 0 < length < 64:
                return made, length
    return None


class PictureEncoder(torch.nn.Module):
    """The part of a vision-language model that turns pictures into what the language model reads."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pictures: dict[str, Any]) -> torch.Tensor:
        """Return the features of all pictures, one row for each place in the prompt."""
        features = self.model.get_image_features(**pictures)
        features = getattr(features, "pooler_output", features)
        parts = features if isinstance(features, (list, tuple)) else [features]
        return torch.cat([part.flatten(0, -2) for part in parts])


def _forms(config: Any, batch: int, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    vision = getattr(config, "vision_config", config)
    patch = _first(_read("patch_size", vision) or 14)
    height = width = _first(_read("image_size", vision) or 2 * patch)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    side = 2 * (_read("spatial_merge_size", vision) or 1)
    frames = _read("temporal_patch_size", vision) or 1
    grid = torch.tensor([[1, side, side]] * batch)
    yield {"pixel_values": random(batch * side * side, 3 * frames * patch * patch), "image_grid_thw": grid}
    yield {"pixel_values": random(batch * side * side, 3, patch, patch), "image_grid_thw": grid}
    edge = patch * (_read("spatial_merge_size", vision) or 1)  # what one place in the prompt stands for
    yield {"pixel_values": random(batch * side * side, edge, edge, 3), "image_grid_thw": grid}
    sizes = torch.tensor([[height, width]] * batch)
    yield {"pixel_values": random(batch, 3, height, width)}
    yield {"pixel_values": random(batch, 3, height, width), "image_sizes": sizes}
    for crops in (1, 2, 3, 5):
        yield {"pixel_values": random(batch, crops, 3, height, width)}
        yield {"pixel_values": random(batch, crops, 3, height, width), "image_sizes": sizes}
