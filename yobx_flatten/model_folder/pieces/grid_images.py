"""Export vision encoders that take patches and their grid: time, height, width."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch

from ...core.compare import compare
from ...errors import GenerationError
from ...generate.pictures import TILED, Tiles
from ...huggingface.cache_names import argument_of, cache_of, installed_name
from ...recipe.aliases import TransformersCache, TransformersModel
from .text import random_values

# function of transformers that interpolates a table of learned positions for any grid
_INTERPOLATES = "get_vision_interpolation_indices_and_weights"
# encoders with attention inside windows of a picture, for which `GridVisionEncoder._windows` computes the windows
_WITH_WINDOWS = ("Qwen2_5_VisionTransformerPretrainedModel",)


class GridVisionEncoder(torch.nn.Module):
    """Computes the features of one picture that replace the picture's tokens, for Qwen2-VL.

    Positions and windows are computed from the index of each patch and the grid, because torch.export cannot trace
    sizes that depend on values.
    """

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.visual = model.model.visual

    @staticmethod
    def fits(model: TransformersModel) -> bool:
        """Return whether a model has an encoder for this class, and a language model that accepts its features."""
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
        """Return features of shape (tokens, hidden size), and features of layers: (tokens, layers, hidden size)."""
        merge, count = self.visual.spatial_merge_size, pixel_values.shape[0]
        # the patches of a block of merge x merge patches are consecutive
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
        """Return the four entries of the position table around each patch, and their bilinear weights."""
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
        """Return the order of the tokens by window, and the end of each window; in a trace, repeated for each token."""
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
    """Make a random picture of ``height`` times ``width`` image tokens."""
    # returns: `pixel_values` of shape (patches, values of a patch), and `image_grid_thw` of shape (1, 3)
    vision = model.config.vision_config
    merge = vision.spatial_merge_size
    grid = torch.tensor([[1, height * merge, width * merge]])
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {"pixel_values": random_values(model, (int(grid.prod()), values), height), "image_grid_thw": grid}


class NestedVisionEncoder(torch.nn.Module):
    """Computes the features of one picture, for models with nested pictures (SmolVLM, Idefics3)."""

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.vision_model, self.connector = model.model.vision_model, model.model.connector
        self.patch_size = model.config.vision_config.patch_size

    @staticmethod
    def fits(model: TransformersModel) -> bool:
        """Return whether this module computes the features of a model's pictures."""
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
        """Raise GenerationError if the features of a picture (1, channels, height, width) differ from the model's."""
        found = model.get_image_features(picture[None])
        features = torch.cat(tuple(getattr(found, "pooler_output", found))).flatten(0, -2)
        if not compare(features, self(picture)["image_features"].flatten(0, -2), "sums"):
            raise GenerationError(
                f"{type(model).__qualname__} processes images in more modules than vision_model and connector. Export "
                "the calls of a run: with record_calls(model) as calls: model.generate(...)"
            )


class TiledVisionEncoder(torch.nn.Module):
    """Computes the features of picture tiles, and the feature that ends each row (LLaVA-NeXT, LLaVA-OneVision)."""

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
        """Return whether this module computes the features of a model's pictures."""
        return getattr(model.config, "model_type", None) in TILED and hasattr(model, "model")

    def forward(self, pixel_values: Any) -> dict[str, Any]:
        """Return features of shape (tiles, tokens, hidden size), and the features of row ends, (tiles, hidden size)."""
        seen = self.vision_tower(pixel_values, output_hidden_states=True, return_dict=True).hidden_states
        found = torch.cat([seen[layer] for layer in self.layers], dim=-1)
        features = self.projector(found[:, 1:] if self.has_class_token else found)
        return {"image_features": features, "image_newline": self.newline.expand(pixel_values.shape[0], -1)}

    @torch.no_grad()
    def check(self, model: TransformersModel) -> None:
        """Raise GenerationError if the features of two pictures differ from the model's features."""
        tiles = Tiles(model.config.to_dict())
        for number in range(2):
            given = tiled_image(model, number)
            features = torch.cat(tuple(model.get_image_features(**given, return_dict=True).pooler_output))
            (picture,) = tiles.split(given["pixel_values"], given["image_sizes"], None)
            found = self(picture)
            packed = tiles.packed([found["image_features"]], found["image_newline"][0], given["image_sizes"])
            if not compare(features, packed, "sums"):
                raise GenerationError(
                    f"{type(model).__qualname__} processes images in more modules than its vision tower, projector "
                    "and packing. Export recorded calls: with record_calls(model) as calls: model.generate(...)"
                )


def tiled_image(model: TransformersModel, number: int = 0) -> dict[str, torch.Tensor]:
    """Make a random picture in the tiles of the model: wide for even numbers, high for odd ones."""
    # returns: `pixel_values` of shape (1, tiles, channels, height, width), and `image_sizes` of shape (1, 2)
    config = model.config
    side, tiles = config.vision_config.image_size, Tiles(config.to_dict())
    # not square, so that the padding of the shorter side is tested
    size = torch.tensor([[side // 2 + 1, 2 * side - 1] if number % 2 == 0 else [2 * side - 1, side // 2 + 1]])
    shape = (1, tiles.count(size), config.vision_config.num_channels, side, side)
    return {"pixel_values": random_values(model, shape, number), "image_sizes": size}


def language_model_of(model: TransformersModel) -> Any:
    """Return the module that reads the text; ``None`` if the model has no such module."""
    inner = getattr(model, "model", None)
    if inner is None and hasattr(model, "language_model") and model.can_generate():  # BLIP-2, with its head
        return model.language_model.base_model
    return getattr(inner, "text_model" if NestedVisionEncoder.fits(model) else "language_model", None)


class _LanguageModel(torch.nn.Module):
    """The language model, from embeddings to scores."""

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.language_model = language_model_of(model)
        self.cache_is = argument_of(self.language_model.forward) or installed_name()
        self.head = model.get_output_embeddings()

    def read(
        self, embeds: Any, mask: Any, positions: Any, cache: TransformersCache | None, **more: Any
    ) -> dict[str, Any]:
        """Return the logits and the updated cache."""
        given = {"inputs_embeds": embeds, "attention_mask": mask, "position_ids": positions, self.cache_is: cache}
        found = self.language_model(**given, use_cache=True, **more)
        return {"logits": self.head(found.last_hidden_state), "cache": cache_of(found)}


class TextDecoder(_LanguageModel):
    """Computes logits from embeddings."""

    def forward(
        self, inputs_embeds: Any, attention_mask: Any, position_ids: Any, cache: TransformersCache | None = None
    ) -> dict[str, Any]:
        """Return the logits and the updated cache."""
        return self.read(inputs_embeds, attention_mask, position_ids, cache)


# Export the language model of a vision-language model whose tokens of one image attend to each other.
#
#     Gemma 3                                    PaliGemma
#     a  [image]  b    token_type_ids 0 1 1 0    [prompt]  c    token_type_ids 0 0 0 1
#     x                                          x  x  x
#     x   x  x         tokens of one image       x  x  x        the whole prompt
#     x   x  x         see each other            x  x  x        what is generated sees
#     x   x  x  x                                x  x  x  x     what is before it


class BlockwiseDecoder(_LanguageModel):
    """Computes logits from embeddings, with masks made from sizes and token types only: one graph for every call.

    transformers reads token types in the first call only. This module reads the types of all tokens in each call. A
    generated token is in no block, so that it attends to all earlier tokens.
    """

    def __init__(self, model: TransformersModel) -> None:
        super().__init__(model)
        self.is_whole_prompt = model.config.model_type == "paligemma"

    @staticmethod
    def fits(model: TransformersModel) -> bool:
        """Return whether a model needs this decoder, as Gemma 3 and PaliGemma do."""
        return getattr(getattr(model, "config", None), "model_type", "") in ("gemma3", "paligemma")

    def types(self, batch: int, past: int, new: int) -> torch.Tensor:
        """Make token types with blocks of 1 in the cache and among new tokens: int64 of shape (batch, past + new)."""
        found = torch.zeros(batch, past + new, dtype=torch.int64)
        if self.is_whole_prompt:
            found[:, past + new // 2 :] = 1
        else:
            found[:, 1 : past - 1] = 1
            found[:, past + 1 :] = 1
        return found

    def forward(
        self,
        inputs_embeds: Any,
        attention_mask: Any,
        position_ids: Any,
        token_type_ids: Any,
        cache: TransformersCache | None = None,
    ) -> dict[str, Any]:
        """Return the logits and the updated cache."""
        config = self.language_model.config
        kinds = getattr(config, "layer_types", None)
        new, total = inputs_embeds.shape[1], attention_mask.shape[1]
        blocks = torch.where(attention_mask.bool(), self._blocks(token_type_ids), -1)

        def mask(kept: Any, window: int | None) -> Any:
            query = torch.arange(new, device=inputs_embeds.device) + (total - new)
            key = torch.arange(kept + new, device=inputs_embeds.device) + (total - new - kept)
            shown, block = key <= query[:, None], blocks.index_select(1, query)[:, :, None]
            together = (block == blocks.index_select(1, key)[:, None]) & (block >= 0)
            near = key > query[:, None] - window if window is not None else torch.ones_like(shown)
            seen = (shown & near) | together if self.is_whole_prompt else (shown | together) & near
            seen = seen & attention_mask.index_select(1, key)[:, None].bool()
            least = torch.finfo(inputs_embeds.dtype).min
            return torch.zeros_like(seen, dtype=inputs_embeds.dtype).masked_fill(~seen, least)[:, None]

        masks: Any = mask(total - new, None)
        if kinds is not None and "sliding_attention" in kinds:
            layer = None if cache is None else cache.layers[kinds.index("sliding_attention")]
            kept = 0 if layer is None or layer.keys is None else layer.keys.shape[-2]
            masks = {"full_attention": masks, "sliding_attention": mask(kept, config.sliding_window)}
        found = self.read(inputs_embeds, masks, position_ids + 1 if self.is_whole_prompt else position_ids, cache)
        cap = getattr(config, "final_logit_softcapping", None) if self.is_whole_prompt else None
        return found if cap is None else {**found, "logits": torch.tanh(found["logits"] / cap) * cap}

    def _blocks(self, types: Any) -> Any:
        """Return the number of the block of each token; -1 for a token outside the blocks."""
        if self.is_whole_prompt:
            return -types.clamp(max=1)
        inside = types == 1
        begins = inside & ~torch.nn.functional.pad(inside, (1, 0))[:, :-1]
        return torch.where(inside, begins.long().cumsum(1) - 1, -1)


class DeepstackDecoder(_LanguageModel):
    """Computes logits from embeddings and from picture features that the first layers add (Qwen3-VL).

    transformers adds features to image tokens, whose number depends on values. This module takes a feature for every
    token, zeros for text: one graph for every call.
    """

    def __init__(self, model: TransformersModel) -> None:
        super().__init__(model)
        self.layers = len(model.model.visual.deepstack_visual_indexes)
        self.language_model = copy.copy(self.language_model)  # shares weights, and leaves the model unchanged
        self.language_model._deepstack_process = _add

    @staticmethod
    def fits(model: TransformersModel) -> bool:
        """Return whether a model needs this decoder, since vision features are added in several layers."""
        inside: Any = getattr(model, "model", None)
        return hasattr(getattr(inside, "language_model", None), "_deepstack_process") and bool(
            getattr(getattr(inside, "visual", None), "deepstack_visual_indexes", None)
        )

    def forward(
        self,
        inputs_embeds: Any,
        attention_mask: Any,
        position_ids: Any,
        deepstack_embeds: Any,
        cache: TransformersCache | None = None,
    ) -> dict[str, Any]:
        """Return the logits and the cache; ``deepstack_embeds`` has shape (batch, length, layers, hidden size)."""
        # transformers passes visual_pos_masks to _add, which ignores the mask
        more = {"visual_pos_masks": attention_mask, "deepstack_visual_embeds": deepstack_embeds.unbind(2)}
        return self.read(inputs_embeds, attention_mask, position_ids, cache, **more)


def _add(hidden_states: Any, _: Any, features: Any) -> Any:
    return hidden_states + features
