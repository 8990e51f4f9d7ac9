"""Export vision encoders of models that cut pictures into tiles (LLaVA-NeXT, LLaVA-OneVision).

How the features of the tiles of a picture stand in a prompt depends on its size. The generator packs them, with the
method of transformers (:mod:`..generate.tiles`).
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.compare import compare
from ...errors import GenerationError
from ...generate.pictures import TILED, Tiles
from ...recipe.aliases import TransformersModel


class TiledVisionEncoder(torch.nn.Module):
    """Tiles to features, and to what ends a row of them."""

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        inner = model.model
        self.vision_tower, self.projector = inner.vision_tower, inner.multi_modal_projector
        self.newline = inner.image_newline
        layers = model.config.vision_feature_layer
        self.layers = [layers] if isinstance(layers, int) else list(layers)
        self.has_class_token = model.config.vision_feature_select_strategy == "default"

    @staticmethod
    def fits(model: TransformersModel) -> bool:
        """Return whether a model takes its pictures so."""
        return getattr(model.config, "model_type", None) in TILED and hasattr(model, "model")

    def forward(self, pixel_values: Any) -> dict[str, Any]:
        """Return features of shape (tiles, tokens, hidden size), and the end of a row, (tiles, hidden size)."""
        seen = self.vision_tower(pixel_values, output_hidden_states=True, return_dict=True).hidden_states
        found = torch.cat([seen[layer] for layer in self.layers], dim=-1)
        features = self.projector(found[:, 1:] if self.has_class_token else found)
        return {"image_features": features, "image_newline": self.newline.expand(pixel_values.shape[0], -1)}

    @torch.no_grad()
    def check(self, model: TransformersModel) -> None:
        """Compare with what the model itself makes of two pictures."""
        tiles = Tiles(model.config.to_dict())
        for number in range(2):
            given = tiled_image(model, number)
            features = torch.cat(tuple(model.get_image_features(**given, return_dict=True).pooler_output))
            (picture,) = tiles.split(given["pixel_values"], given["image_sizes"], None)
            found = self(picture)
            packed = tiles.packed([found["image_features"]], found["image_newline"][0], given["image_sizes"])
            if not compare(features, packed, "sums"):
                raise GenerationError(
                    f"{type(model).__qualname__} does more with a picture than its vision tower, its projector and "
                    "its packing. Export the calls of a run: with record_calls(model) as calls: model.generate(...)"
                )


def tiled_image(model: TransformersModel, number: int = 0) -> dict[str, torch.Tensor]:
    """Make a random picture, cut as the model cuts it: wide ones for even numbers, and high ones."""
    # returns: `pixel_values` of shape (1, tiles, channels, height, width), and `image_sizes` of shape (1, 2)
    config = model.config
    side, tiles = config.vision_config.image_size, Tiles(config.to_dict())
    # padded along its shorter side, which is left out of the features
    size = torch.tensor([[side // 2 + 1, 2 * side - 1] if number % 2 == 0 else [2 * side - 1, side // 2 + 1]])
    shape = (1, tiles.count(size), config.vision_config.num_channels, side, side)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(model.dtype)
    return {"pixel_values": pixels, "image_sizes": size}
