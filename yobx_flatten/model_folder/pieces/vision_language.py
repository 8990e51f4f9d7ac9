"""Split a vision-language model into exported modules.

.. code-block:: text

    image  ──> vision_encoder ──┐
    tokens ──> embed_tokens ────┴─ by the caller ──> decoder_model_merged ──> logits, cache
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.export import Dim

from ...errors import GenerationError
from ...export.proof.eager_runs import Case
from ...huggingface.cache_names import cache_of
from ...recipe.aliases import TransformersModel
from ...trees.shapes import dynamic_shapes
from .grid_images import (
    BlockwiseDecoder,
    DeepstackDecoder,
    GridVisionEncoder,
    NestedVisionEncoder,
    TextDecoder,
    TiledVisionEncoder,
    grid_image,
    language_model_of,
    tiled_image,
)
from .text import EVERY, Piece, Split, random_tokens, random_values

_OTHER_WAYS = (
    "Export it with its own inputs, export_onnx(model, kwargs=inputs, path=...), or export recorded calls: with "
    "record_calls(model) as calls: model.generate(...)"
)


class VisionEncoder(torch.nn.Module):
    """Computes the features of one image that replace the image's tokens.

    A file takes one image, because models return a list with one entry per image, whose length a trace fixes.
    """

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Any) -> dict[str, Any]:
        """Return features of shape (1, tokens per image, hidden size)."""
        found = self.model.get_image_features(pixel_values)
        found = getattr(found, "pooler_output", found)  # transformers 4 returns the features themselves
        return {"image_features": torch.stack(tuple(found)) if isinstance(found, (tuple, list)) else found}


class Embedding(torch.nn.Module):
    """Computes embeddings of tokens."""

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.embedding = model.get_input_embeddings()

    def forward(self, input_ids: Any) -> dict[str, Any]:
        """Return embeddings of shape (batch, length, hidden size)."""
        return {"inputs_embeds": self.embedding(input_ids)}


def vision_language_pieces(model: TransformersModel, split: Split = EVERY) -> list[Piece]:
    """Return the files to export: ``vision_encoder``, ``embed_tokens`` and ``decoder_model_merged``."""
    _check_splits(model)
    rows = split.rows
    has_grids = GridVisionEncoder.fits(model)
    kinds_of = (BlockwiseDecoder, DeepstackDecoder)
    decoder: Any = next((kind(model) for kind in kinds_of if kind.fits(model)), None) or TextDecoder(model)
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 8

    @torch.no_grad()
    def decode(batch: int, past: int, new: int, padding: int) -> dict[str, Any]:
        embeds = model.get_input_embeddings()(random_tokens(model, (batch, past + new)))
        mask = torch.ones(batch, past + new, dtype=torch.int64)
        mask[0, :padding] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        if has_grids:
            positions = torch.stack([positions, positions + 1, positions + 3])  # time, height and width differ
        first, more = {}, {}
        if isinstance(decoder, BlockwiseDecoder):
            more["token_type_ids"] = decoder.types(batch, past, new)
            first["token_type_ids"] = more["token_type_ids"][:, :past]
        if isinstance(decoder, DeepstackDecoder):
            features = embeds[:, :, None].repeat(1, 1, decoder.layers, 1).cos()
            first["deepstack_embeds"], more["deepstack_embeds"] = features.split([past, new], dim=1)
        read = decoder(embeds[:, :past], mask[:, :past], positions[..., :past], **first)
        return {
            "inputs_embeds": embeds[:, past:],
            "attention_mask": mask,
            "position_ids": positions[..., past:],
            **more,
            "cache": cache_of(read),
        }

    tokens = {length: {"input_ids": random_tokens(model, (rows or 3, length))} for length in (1, 6)}
    pasts = (3, window + 3) if window <= 512 else (3, 11)
    sizes = split.named(("batch", "past"), (3, pasts[0], 1, 2), (1, pasts[1], 1, 2))
    cases = [Case(name, (), decode(*size)) for name, size in sizes.items()]
    example = decode(rows or 2, 5, 3, 0)
    shapes: Any = "auto"
    if "deepstack_embeds" in example:  # the number of layers and their width do not vary
        shapes = dynamic_shapes(example, {"deepstack_embeds": {0: Dim.AUTO, 1: Dim.AUTO}})
    return [
        _vision_piece(model),
        Piece(
            "embed_tokens",
            Embedding(model),
            {"input_ids": random_tokens(model, (rows or 2, 4))},
            [Case(f"length {length}", (), given) for length, given in tokens.items()],
        ),
        Piece("decoder_model_merged", decoder, example, cases, shapes),
    ]


def _check_splits(model: TransformersModel) -> None:
    takes = inspect.signature(model.forward).parameters
    types = next((name for name in takes if name.endswith("token_type_ids")), None)
    if types is not None and not GridVisionEncoder.fits(model) and not BlockwiseDecoder.fits(model):
        raise GenerationError(
            f"{type(model).__qualname__} needs {types} to mark image tokens. Exported vision-language files have "
            "no such input."
        )
    if language_model_of(model) is None:
        raise GenerationError(
            f"{type(model).__qualname__} has no model.language_model to export separately. {_OTHER_WAYS}"
        )


def _vision_piece(model: TransformersModel) -> Piece:
    if TiledVisionEncoder.fits(model):
        (tiles,) = tiled_image(model)["pixel_values"]
        counts = {1: tiles[:1], 5: torch.cat([tiles, tiles])[:5]}
        cases = [Case(f"{count} tiles", (), {"pixel_values": given}) for count, given in counts.items()]
        shapes = {"pixel_values": {0: Dim.AUTO}}
        given = {"pixel_values": tiles}
        return Piece("vision_encoder", vision_encoder(model), given, cases, shapes, has_rows=False)
    if not GridVisionEncoder.fits(model):
        images = [{"pixel_values": image[None]} for image in images_for(model, 3)]
        others = [Case(f"image {number}", (), given) for number, given in enumerate(images[1:], 2)]
        return Piece("vision_encoder", vision_encoder(model), images[0], others, dynamic_shapes=None)
    grids = {f"{high} x {wide} tokens": grid_image(model, high, wide) for high, wide in ((4, 3), (1, 2), (2, 5))}
    cases = [Case(name, (), given) for name, given in grids.items()]
    shapes = {"pixel_values": {0: Dim.AUTO}, "image_grid_thw": {}}
    return Piece("vision_encoder", GridVisionEncoder(model), grid_image(model, 2, 3), cases, shapes, has_rows=False)


def vision_encoder(model: TransformersModel) -> torch.nn.Module:
    """Return the module that computes features of one picture, for models with pictures or tiles of one size."""
    if TiledVisionEncoder.fits(model):
        tiled = TiledVisionEncoder(model)
        tiled.check(model)
        return tiled
    if not NestedVisionEncoder.fits(model):
        return VisionEncoder(model)
    encoder = NestedVisionEncoder(model)
    encoder.check(model, images_for(model, 1))
    return encoder


def images_for(model: TransformersModel, count: int) -> torch.Tensor:
    """Make random images of the size that the model accepts, of shape (count, channels, height, width)."""
    vision = model.config.vision_config
    size = getattr(vision, "image_size", None)
    sides = [size, size] if isinstance(size, int) else size
    if not isinstance(sides, (list, tuple)) or len(sides) != 2:
        raise GenerationError(
            f"{type(model).__qualname__} takes images of several sizes, and the files of a folder take one. "
            f"{_OTHER_WAYS}"
        )
    shape = (count, getattr(vision, "num_channels", 3), *sides)
    return random_values(model, shape, count)


def image_token_of(model: TransformersModel) -> int:
    """Return the token that features of pictures replace."""
    found = getattr(model.config, "image_token_id", None)
    return int(model.config.image_token_index if found is None else found)
