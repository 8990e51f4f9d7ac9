"""Export encoders of nested pictures (SmolVLM, Idefics3): (rows, pictures, channels, height, width).

The model leaves out pictures of zeros, which pad rows that have fewer; a trace cannot. So the file takes one picture,
and the generator leaves those of zeros out.
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.compare import compare
from ...errors import GenerationError
from ...recipe.aliases import TransformersModel


class NestedVisionEncoder(torch.nn.Module):
    """One picture to the features that stand in the place of its tokens."""

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.vision_model, self.connector = model.model.vision_model, model.model.connector
        self.patch_size = model.config.vision_config.patch_size

    @staticmethod
    def fits(model: TransformersModel) -> bool:
        """Return whether a model takes its pictures so."""
        inner = getattr(model, "model", None)
        return all(hasattr(inner, name) for name in ("vision_model", "connector", "text_model"))

    def forward(self, pixel_values: Any) -> dict[str, Any]:
        """Return features of shape (1, tokens per image, hidden size)."""
        high, wide = (size // self.patch_size for size in pixel_values.shape[-2:])
        mask = torch.ones(len(pixel_values), high, wide, dtype=torch.bool)
        seen = self.vision_model(pixel_values=pixel_values, patch_attention_mask=mask).last_hidden_state
        return {"image_features": self.connector(seen)}

    @torch.no_grad()
    def check(self, model: TransformersModel, picture: torch.Tensor) -> None:
        """Compare with what the model itself makes of a picture."""
        # picture: pixels of shape (1, channels, height, width)
        found = model.get_image_features(picture[None])
        features = torch.cat(tuple(getattr(found, "pooler_output", found))).flatten(0, -2)
        if not compare(features, self(picture)["image_features"].flatten(0, -2), "sums"):
            raise GenerationError(
                f"{type(model).__qualname__} does more with a picture than its vision_model and its connector. Export "
                "the calls of a run: with record_calls(model) as calls: model.generate(...)"
            )
