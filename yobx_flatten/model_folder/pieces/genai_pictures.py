"""Split a vision-language model into the files that onnxruntime-genai runs.

.. code-block:: text

    picture ──> vision_encoder ──> features ──┐
    tokens ───────────────────────────────────┴──> embedding ──> decoder_model_merged ──> scores, cache

The library puts no features into embeddings: a file that takes both does. `embed_tokens`, which this package calls, has
tokens alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.export import Dim

from ...export.proof.case import Case
from ...recipe.aliases import TransformersModel
from .blockwise_decoder import BlockwiseDecoder, DeepstackDecoder
from .grid_images import GridVisionEncoder, NestedVisionEncoder, TiledVisionEncoder
from .text import Piece, random_tokens
from .vision_language import vision_language_pieces

EMBEDDING = "embedding"
"""Name of the file that takes tokens and features, without its suffix."""

_OTHERS = (
    (
        GridVisionEncoder.fits,
        "its pictures have positions in time, height and width, which the library makes in its own way",
    ),
    (TiledVisionEncoder.fits, "its pictures are cut into tiles, which the library does in its own way"),
    (NestedVisionEncoder.fits, "its pictures are cut into tiles, which the library does in its own way"),
    (
        BlockwiseDecoder.fits,
        "tokens of a picture see each other, and the library hands the decoder no types of tokens",
    ),
    (DeepstackDecoder.fits, "features of pictures also enter between its layers"),
)


def why_not_in_genai(model: TransformersModel) -> str | None:
    """Return why the library does not see with a model as the model does; ``None`` where it does."""
    return next((why for fits, why in _OTHERS if fits(model)), None)


class FlatVisionEncoder(torch.nn.Module):
    """One picture to features of shape (tokens, hidden size)."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixel_values: Any) -> dict[str, Any]:
        """Return the features."""
        return {"image_features": self.encoder(pixel_values)["image_features"].flatten(0, 1)}


class EmbeddingWithFeatures(torch.nn.Module):
    """Tokens to embeddings, those of pictures to features, in order."""

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.embedding = model.get_input_embeddings()
        self.token = image_token_of(model)

    def forward(self, input_ids: Any, image_features: Any) -> dict[str, Any]:
        """Return embeddings of shape (batch, length, hidden size); there may be no features."""
        embeds = self.embedding(input_ids)
        is_picture = input_ids.eq(self.token)
        # one row more: without it nothing could be looked up where there are no features
        rows = torch.cat([image_features.to(embeds.dtype), embeds.new_zeros(1, embeds.shape[-1])])
        place = (is_picture.flatten().cumsum(0) - 1).clamp(min=0, max=rows.shape[0] - 1).reshape(input_ids.shape)
        return {"inputs_embeds": torch.where(is_picture[..., None], rows[place], embeds)}


def image_token_of(model: TransformersModel) -> int:
    """Return the token that features of pictures replace."""
    found = getattr(model.config, "image_token_id", None)
    return int(model.config.image_token_index if found is None else found)


def genai_picture_pieces(model: TransformersModel, rows: int | None = None) -> list[Piece]:
    """The pieces of any vision-language model with flat features, and an ``embedding`` that takes them."""
    vision, embed, decoder = vision_language_pieces(model, rows)
    vision = dataclasses.replace(vision, module=FlatVisionEncoder(vision.module).eval())
    with torch.no_grad():
        features = vision.module(**vision.kwargs)["image_features"]
    token, count = image_token_of(model), len(features)

    def given(batch: int, length: int, shown: int) -> dict[str, Any]:
        ids = random_tokens(model, (batch, length))
        ids[ids == token] = token + 1
        ids[0, 1 : 1 + shown] = token
        return {"input_ids": ids, "image_features": features[:shown]}

    cases = [Case("no picture", (), given(rows or 1, 3, 0)), Case("a token", (), given(rows or 3, 1, 0))]
    shapes = {"input_ids": {0: Dim.AUTO, 1: Dim.AUTO}, "image_features": {0: Dim.AUTO}}
    example = given(rows or 2, count + 3, count)
    return [vision, embed, Piece(EMBEDDING, EmbeddingWithFeatures(model).eval(), example, cases, shapes), decoder]
