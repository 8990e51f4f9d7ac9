"""Export vision encoders that take patches and their grid: time, height, width."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ...recipe.aliases import TransformersModel
from .deepstack_decoder import DeepstackDecoder

# what makes positions of any grid out of a table of learned ones
_INTERPOLATES = "get_vision_interpolation_indices_and_weights"
# encoders whose layers see windows of a picture, and have a version to trace that does
_WITH_WINDOWS = ("Qwen2_5_VisionTransformerPretrainedModel",)


class GridVisionEncoder(torch.nn.Module):
    """One picture to the features that stand in the place of its tokens, for Qwen2-VL.

    Where each patch is, and in which window, follows from its number and the grid, without a size that depends on
    values.
    """

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.visual = model.model.visual

    @staticmethod
    def fits(model: TransformersModel) -> bool:
        """Return whether a model has such an encoder, and a language model that takes what it returns."""
        inside: Any = getattr(model, "model", None)
        if not all(hasattr(inside, name) for name in ("visual", "language_model", "get_rope_index")):
            return False
        takes = inspect.signature(inspect.unwrap(type(inside.language_model).forward)).parameters
        sees = inspect.unwrap(type(inside.visual).forward).__code__.co_names
        table = (
            getattr(inside.visual, "interpolation_mode", ""),
            getattr(inside.visual, "interpolation_align_corners", 0),
        )
        return (
            ("deepstack_visual_embeds" not in takes or DeepstackDecoder.fits(model))
            and {"get_vision_position_ids", "get_vision_attention_seqlens"} <= set(sees)
            and (_INTERPOLATES not in sees or table == ("bilinear", True))
            and ("get_vision_window_index" not in sees or type(inside.visual).__name__ in _WITH_WINDOWS)
        )

    def forward(self, pixel_values: Any, image_grid_thw: Any) -> dict[str, Any]:
        """Return features of shape (tokens, hidden size), and those of layers: (tokens, layers, hidden size)."""
        merge, count = self.visual.spatial_merge_size, pixel_values.shape[0]
        # patches are in blocks of merge x merge, those of a block next to each other
        patch = torch.arange(count, device=pixel_values.device)
        block, wide = patch // merge**2, image_grid_thw[0, 2] // merge
        row, column = block // wide * merge + patch // merge % merge, block % wide * merge + patch % merge
        found = self.visual(
            pixel_values,
            grid_thw=image_grid_thw,
            position_ids=torch.stack([row, column], dim=-1),
            cu_seqlens=torch.arange(2, device=pixel_values.device) * count,
            **self._windows(count, wide),
            **self._interpolated(row, column, image_grid_thw[0]),
        )
        features = {"image_features": found.pooler_output}
        between = getattr(found, "deepstack_features", None)
        return features if between is None else features | {"deepstack_features": torch.stack(tuple(between), dim=1)}

    def _interpolated(self, row: Any, column: Any, grid: Any) -> dict[str, Any]:
        """The four entries of a square table of learned positions that each patch is between, and their weights."""
        if getattr(self.visual, "interpolation_mode", None) is None:
            return {}
        side = self.visual.num_grid_per_side

        def between(index: Any, size: Any) -> tuple[Any, Any]:
            at = index * (side - 1) / (size - 1).clamp(min=1)
            low = at.floor()
            near = torch.stack([low, (low + 1).clamp(max=side - 1)], dim=-1).long()
            return near, torch.stack([1 + low - at, at - low], dim=-1)

        (rows, of_row), (columns, of_column) = between(row, grid[1]), between(column, grid[2])
        return {
            "interp_indices": (rows[:, :, None] * side + columns[:, None]).flatten(1),
            "interp_weights": (of_row[:, :, None] * of_column[:, None]).flatten(1),
        }

    def _windows(self, count: Any, wide: Any) -> dict[str, Any]:
        """The order of the tokens by window, and where each window ends; in a trace once for each of its tokens."""
        if type(self.visual).__name__ not in _WITH_WINDOWS:
            return {}
        merge = self.visual.spatial_merge_size
        size = self.visual.window_size // merge // self.visual.patch_size
        token = torch.arange(count // merge**2, device=wide.device)
        window = token // wide // size * wide + token % wide // size
        order = torch.argsort(window * token.shape[0] + token)
        window = window[order]
        ends = (window[:, None] >= window).sum(-1) * merge**2
        if not torch.compiler.is_compiling():  # the number of windows is a size that depends on values
            ends = ends.unique_consecutive()
        return {"window_index": order, "cu_window_seqlens": torch.nn.functional.pad(ends, (1, 0))}


def grid_image(model: TransformersModel, height: int, width: int) -> dict[str, torch.Tensor]:
    """Make a random picture."""
    # returns: `pixel_values` of shape (patches, values of a patch), and `image_grid_thw` of shape (1, 3)
    vision = model.config.vision_config
    merge = vision.spatial_merge_size
    grid = torch.tensor([[1, height * merge, width * merge]])
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    generator = torch.Generator().manual_seed(height)
    pixels = torch.randn(int(grid.prod()), values, generator=generator)
    return {"pixel_values": pixels.to(model.dtype), "image_grid_thw": grid}
