"""Split a vision-language model into exported modules."""

# image  ──> vision_encoder ──┐
# tokens ──> embed_tokens ────┴─ by the caller ──> decoder_model_merged ──> logits, cache

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import Dim

from ...core.compare import compare
from ...errors import GenerationError
from ...export.proof.eager_runs import Case
from ...generate.pictures import TILED, Tiles
from ...generate.settings import settings_of
from ...huggingface.cache_names import argument_of, cache_of, installed_name
from ...registry.recipe.aliases import TransformersCache, TransformersModel
from ...trees.shapes import dynamic_shapes
from .text import EVERY, Piece, Split, random_tokens, random_values

# function of transformers that interpolates a table of learned positions for any grid
_INTERPOLATES = "get_vision_interpolation_indices_and_weights"
# encoders with attention inside windows of a picture, for which `GridVisionEncoder` computes the windows
_WITH_WINDOWS = ("Qwen2_5_VisionTransformerPretrainedModel",)


class GridVisionEncoder(torch.nn.Module):
    """Computes the features that replace the image tokens of one picture (Qwen2-VL)."""

    # positions and windows are computed from the index of each patch, since a trace has no sizes that depend on values

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.visual = model.model.visual

    @staticmethod
    def fits(model: TransformersModel) -> bool:
        """Return whether this class can run a model's vision encoder, and exported decoders accept its features."""
        inside: Any = getattr(model, "model", None)
        if not all(hasattr(inside, name) for name in ("visual", "language_model", "get_rope_index")):
            return False
        takes = inspect.signature(inspect.unwrap(type(inside.language_model).forward)).parameters
        sees = inspect.unwrap(type(inside.visual).forward).__code__.co_names
        visual = inside.visual
        table = getattr(visual, "interpolation_mode", ""), getattr(visual, "interpolation_align_corners", 0)
        return (
            ("deepstack_visual_embeds" not in takes or DeepstackDecoder.fits(model))
            and {"get_vision_position_ids", "get_vision_attention_seqlens"} <= set(sees)
            and (_INTERPOLATES not in sees or table == ("bilinear", True))
            and ("get_vision_window_index" not in sees or type(visual).__name__ in _WITH_WINDOWS)
        )

    def forward(self, pixel_values: Any, image_grid_thw: Any) -> dict[str, Any]:
        """Return the features of image tokens and, if any, the features that decoder layers add to hidden states."""
        merge, count = self.visual.spatial_merge_size, pixel_values.shape[0]
        # the patches of a block of merge x merge patches are consecutive
        patch = torch.arange(count, device=pixel_values.device)
        block, wide = patch // merge**2, image_grid_thw[0, 2] // merge
        row, column = block // wide * merge + patch // merge % merge, block % wide * merge + patch % merge
        given = {
            "position_ids": torch.stack([row, column], dim=-1),
            "cu_seqlens": torch.arange(2, device=pixel_values.device) * count,
        }
        if type(self.visual).__name__ in _WITH_WINDOWS:
            # the order of image tokens by attention window, and the index of the patch after each window
            size = self.visual.window_size // merge // self.visual.patch_size
            token = torch.arange(count // merge**2, device=wide.device)
            window = token // wide // size * wide + token % wide // size
            given["window_index"] = order = torch.argsort(window * token.shape[0] + token)
            window = window[order]
            ends = (window[:, None] >= window).sum(-1) * merge**2
            # a trace keeps an end per token: the number of windows depends on values
            if not torch.compiler.is_compiling():
                ends = ends.unique_consecutive()
            given["cu_window_seqlens"] = torch.nn.functional.pad(ends, (1, 0))
        if getattr(self.visual, "interpolation_mode", None) is not None:
            # the indices of the four position embeddings around each patch, and their bilinear weights
            side, grid = self.visual.num_grid_per_side, image_grid_thw[0]

            def between(index: Any, size: Any) -> tuple[Any, Any]:
                at = index * (side - 1) / (size - 1).clamp(min=1)
                low = at.floor()
                near = torch.stack([low, (low + 1).clamp(max=side - 1)], dim=-1).long()
                return near, torch.stack([1 + low - at, at - low], dim=-1)

            (rows, of_row), (columns, of_column) = between(row, grid[1]), between(column, grid[2])
            given["interp_indices"] = (rows[:, :, None] * side + columns[:, None]).flatten(1)
            given["interp_weights"] = (of_row[:, :, None] * of_column[:, None]).flatten(1)
        found = self.visual(pixel_values, grid_thw=image_grid_thw, **given)
        features = {"image_features": found.pooler_output}
        added = getattr(found, "deepstack_features", None)
        return features if added is None else features | {"deepstack_features": torch.stack(tuple(added), dim=1)}


def grid_image(model: TransformersModel, height: int, width: int) -> dict[str, torch.Tensor]:
    # returns: `pixel_values` of shape (patches, values of a patch), and `image_grid_thw` of shape (1, 3)
    vision = model.config.vision_config
    merge = vision.spatial_merge_size
    grid = torch.tensor([[1, height * merge, width * merge]])
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {"pixel_values": random_values(model, (int(grid.prod()), values), height), "image_grid_thw": grid}


class NestedVisionEncoder(torch.nn.Module):
    """Computes the features of one picture, for models with several pictures per prompt (SmolVLM, Idefics3)."""

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.vision_model, self.connector = model.model.vision_model, model.model.connector
        self.patch_size = model.config.vision_config.patch_size

    @staticmethod
    def fits(model: TransformersModel) -> bool:
        inner = getattr(model, "model", None)
        return all(hasattr(inner, name) for name in ("vision_model", "connector", "text_model"))

    def forward(self, pixel_values: Any) -> dict[str, Any]:
        high, wide = (size // self.patch_size for size in pixel_values.shape[-2:])
        mask = torch.ones(len(pixel_values), high, wide, dtype=torch.bool)
        seen = self.vision_model(pixel_values=pixel_values, patch_attention_mask=mask).last_hidden_state
        return {"image_features": self.connector(seen)}

    @torch.no_grad()
    def check(self, model: TransformersModel) -> None:
        picture = images_for(model, 1)
        found = model.get_image_features(picture[None])
        features = torch.cat(tuple(getattr(found, "pooler_output", found))).flatten(0, -2)
        if not compare(features, self(picture)["image_features"].flatten(0, -2), "sums"):
            raise GenerationError(
                f"vision_model and connector of {type(model).__qualname__} cannot be exported alone: image features "
                "would differ. Export recorded calls:\n    with record_calls(model) as calls: model.generate(...)"
            )


class TiledVisionEncoder(torch.nn.Module):
    """Computes features of picture tiles, and the feature that ends a row of patches (LLaVA-NeXT, LLaVA-OneVision)."""

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        inner = model.model
        self.vision_tower, self.projector = inner.vision_tower, inner.multi_modal_projector
        self.newline = inner.image_newline
        layers = model.config.vision_feature_layer
        self.layers = [layers] if isinstance(layers, int) else list(layers)
        self.has_class_token = model.config.vision_feature_select_strategy == "default"

    def forward(self, pixel_values: Any) -> dict[str, Any]:
        """Return, for each tile, its features and a copy of the embedding that ends a row of the picture's patches."""
        seen = self.vision_tower(pixel_values, output_hidden_states=True, return_dict=True).hidden_states
        found = torch.cat([seen[layer] for layer in self.layers], dim=-1)
        features = self.projector(found[:, 1:] if self.has_class_token else found)
        return {"image_features": features, "image_newline": self.newline.expand(pixel_values.shape[0], -1)}

    @torch.no_grad()
    def check(self, model: TransformersModel) -> None:
        tiles = Tiles(model.config.to_dict())
        for number in range(2):
            given = tiled_image(model, number)
            features = torch.cat(tuple(model.get_image_features(**given, return_dict=True).pooler_output))
            (picture,) = tiles.split(given["pixel_values"], given["image_sizes"], None)
            found = self(picture)
            packed = tiles.packed([found["image_features"]], found["image_newline"][0], given["image_sizes"])
            if not compare(features, packed, "sums"):
                raise GenerationError(
                    f"Vision tower and projector of {type(model).__qualname__} cannot be exported alone: features "
                    "would differ. Export recorded calls:\n    with record_calls(model) as calls: model.generate(...)"
                )


def tiled_image(model: TransformersModel, number: int = 0) -> dict[str, torch.Tensor]:
    """Make a random picture, cut into the model's tiles: a wide picture for an even ``number``, else a high picture."""
    # returns: `pixel_values` of shape (1, tiles, channels, height, width), and `image_sizes` of shape (1, 2)
    config = model.config
    side, tiles = config.vision_config.image_size, Tiles(config.to_dict())
    # not square, so that the padding of the shorter side is tested
    size = torch.tensor([[side // 2 + 1, 2 * side - 1] if number % 2 == 0 else [2 * side - 1, side // 2 + 1]])
    shape = (1, sum(tiles.counts(size, None)), config.vision_config.num_channels, side, side)
    return {"pixel_values": random_values(model, shape, number), "image_sizes": size}


def language_model_of(model: TransformersModel) -> Any:
    inner = getattr(model, "model", None)
    if inner is None and hasattr(model, "language_model") and model.can_generate():  # BLIP-2, with its head
        return model.language_model.base_model
    return getattr(inner, "text_model" if NestedVisionEncoder.fits(model) else "language_model", None)


class _LanguageModel(torch.nn.Module):
    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.language_model = language_model_of(model)
        self.cache_is = argument_of(self.language_model.forward) or installed_name()
        self.head = model.get_output_embeddings()

    def read(
        self, embeds: Any, mask: Any, positions: Any, cache: TransformersCache | None, **more: Any
    ) -> dict[str, Any]:
        given = {"inputs_embeds": embeds, "attention_mask": mask, "position_ids": positions, self.cache_is: cache}
        found = self.language_model(**given, use_cache=True, **more)
        return {"logits": self.head(found.last_hidden_state), "cache": cache_of(found)}


class TextDecoder(_LanguageModel):
    def forward(
        self, inputs_embeds: Any, attention_mask: Any, position_ids: Any, cache: TransformersCache | None = None
    ) -> dict[str, Any]:
        return self.read(inputs_embeds, attention_mask, position_ids, cache)


# The tokens of one image attend to each other:
#
#     Gemma 3                                    PaliGemma
#     a  [image]  b    token_type_ids 0 1 1 0    [prompt]  c    token_type_ids 0 0 0 1
#     x                                          x  x  x
#     x   x  x         tokens of one image       x  x  x        the whole prompt
#     x   x  x         see each other            x  x  x        what is generated sees
#     x   x  x  x                                x  x  x  x     what is before it


class BlockwiseDecoder(_LanguageModel):
    """Computes logits from embeddings, for models in which picture tokens attend to each other (Gemma 3, PaliGemma)."""

    # transformers reads `token_type_ids` in the first call only; each call of the module takes them for all tokens,
    # including cached ones. A generated token is outside image blocks, and attends to all earlier tokens.

    def __init__(self, model: TransformersModel) -> None:
        super().__init__(model)
        self.is_whole_prompt = model.config.model_type == "paligemma"

    def types(self, batch: int, past: int, new: int) -> torch.Tensor:
        """Make ``token_type_ids`` for an export, of shape (batch, past + new), with both zeros and ones."""
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
        config = self.language_model.config
        kinds = getattr(config, "layer_types", None)
        new, total = inputs_embeds.shape[1], attention_mask.shape[1]
        if self.is_whole_prompt:
            block_of = -token_type_ids.clamp(max=1)
        else:
            inside = token_type_ids == 1
            begins = inside & ~torch.nn.functional.pad(inside, (1, 0))[:, :-1]
            block_of = torch.where(inside, begins.long().cumsum(1) - 1, -1)
        # the index of each token's block, in which tokens attend to each other; -1 outside of blocks
        blocks = torch.where(attention_mask.bool(), block_of, -1)

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


class DeepstackDecoder(_LanguageModel):
    """Computes logits from embeddings and from picture features that the first layers add (Qwen3-VL)."""

    # takes a feature for every token, zeros for text, because a trace cannot vary the number of image tokens

    def __init__(self, model: TransformersModel) -> None:
        super().__init__(model)
        self.layers = len(model.model.visual.deepstack_visual_indexes)
        self.language_model = copy.copy(self.language_model)  # shares weights, and leaves the model unchanged
        self.language_model._deepstack_process = lambda hidden, _, features: hidden + features

    @staticmethod
    def fits(model: TransformersModel) -> bool:
        inside: Any = getattr(model, "model", None)
        layers = getattr(getattr(inside, "visual", None), "deepstack_visual_indexes", None)
        return hasattr(getattr(inside, "language_model", None), "_deepstack_process") and bool(layers)

    def forward(
        self,
        inputs_embeds: Any,
        attention_mask: Any,
        position_ids: Any,
        deepstack_embeds: Any,
        cache: TransformersCache | None = None,
    ) -> dict[str, Any]:
        """Return logits and cache; ``deepstack_embeds`` has shape (batch, length, layers, hidden size)."""
        # transformers passes visual_pos_masks to _deepstack_process, which ignores the mask
        more = {"visual_pos_masks": attention_mask, "deepstack_visual_embeds": deepstack_embeds.unbind(2)}
        return self.read(inputs_embeds, attention_mask, position_ids, cache, **more)


_OTHER_WAYS = (
    "Export the model with its own inputs, export_onnx(model, kwargs=inputs, path=...), or export recorded calls: with "
    "record_calls(model) as calls: model.generate(...)"
)


class VisionEncoder(torch.nn.Module):
    """Computes the features of one image per call, since a trace would fix the number of images in a call."""

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Any) -> dict[str, Any]:
        found = self.model.get_image_features(pixel_values)
        found = getattr(found, "pooler_output", found)  # transformers 4 returns the features themselves
        return {"image_features": torch.stack(tuple(found)) if isinstance(found, (tuple, list)) else found}


def vision_modules(model: TransformersModel) -> tuple[type[torch.nn.Module], type[torch.nn.Module]]:
    """Return the classes of this file that export a model's vision encoder and its decoder."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    encoder: type[torch.nn.Module] = VisionEncoder
    if GridVisionEncoder.fits(model):
        encoder = GridVisionEncoder
    elif kind in TILED and hasattr(model, "model"):
        encoder = TiledVisionEncoder
    elif NestedVisionEncoder.fits(model):
        encoder = NestedVisionEncoder
    if kind in ("gemma3", "paligemma"):
        return encoder, BlockwiseDecoder
    return encoder, DeepstackDecoder if DeepstackDecoder.fits(model) else TextDecoder


class Embedding(torch.nn.Module):
    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.embedding = model.get_input_embeddings()

    def forward(self, input_ids: Any) -> dict[str, Any]:
        return {"inputs_embeds": self.embedding(input_ids)}


def vision_language_pieces(model: TransformersModel, split: Split = EVERY) -> list[Piece]:
    (encoder_kind, decoder_kind), rows = vision_modules(model), split.rows
    takes = inspect.signature(model.forward).parameters
    types = next((name for name in takes if name.endswith("token_type_ids")), None)
    if types is not None and encoder_kind is not GridVisionEncoder and decoder_kind is not BlockwiseDecoder:
        raise GenerationError(
            f"{type(model).__qualname__} needs {types} to mark image tokens, but exported vision-language files "
            f"have no input {types}. {_OTHER_WAYS}"
        )
    if language_model_of(model) is None:
        name = type(model).__qualname__
        raise GenerationError(f"{name} has no model.language_model to export separately. {_OTHER_WAYS}")
    decoder: Any = decoder_kind(model)
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 8

    @torch.no_grad()
    def decode(batch: int, past: int, new: int, padding: int) -> dict[str, Any]:
        embeds = model.get_input_embeddings()(random_tokens(model, (batch, past + new)))
        mask = torch.ones(batch, past + new, dtype=torch.int64)
        mask[0, :padding] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        if encoder_kind is GridVisionEncoder:
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
    lengths = [Case(f"length {length}", (), given) for length, given in tokens.items()]
    pasts = (3, window + 3) if window <= 512 else (3, 11)
    made = split.named(("batch", "past"), decode, (3, pasts[0], 1, 2), (1, pasts[1], 1, 2))
    cases = [Case(name, (), given) for name, given in made.items()]
    example = decode(rows or 2, 5, 3, 0)
    shapes: Any = "auto"
    if "deepstack_embeds" in example:  # the number of layers and their width do not vary
        shapes = dynamic_shapes(example, {"deepstack_embeds": {0: Dim.AUTO, 1: Dim.AUTO}})
    return [
        _vision_piece(model, encoder_kind),
        Piece("embed_tokens", Embedding(model), {"input_ids": random_tokens(model, (rows or 2, 4))}, lengths),
        Piece("decoder_model_merged", decoder, example, cases, shapes),
    ]


def _vision_piece(model: TransformersModel, kind: type[torch.nn.Module]) -> Piece:
    if kind is GridVisionEncoder:
        grids = {f"{high} x {wide} tokens": grid_image(model, high, wide) for high, wide in ((4, 3), (1, 2), (2, 5))}
        cases = [Case(name, (), given) for name, given in grids.items()]
        shapes: Any = {"pixel_values": {0: Dim.AUTO}, "image_grid_thw": {}}
        return Piece("vision_encoder", kind(model), grid_image(model, 2, 3), cases, shapes, has_rows=False)
    encoder = kind(model)
    if isinstance(encoder, TiledVisionEncoder | NestedVisionEncoder):
        encoder.check(model)
    if kind is TiledVisionEncoder:
        (tiles,) = tiled_image(model)["pixel_values"]
        counts = {1: tiles[:1], 5: torch.cat([tiles, tiles])[:5]}
        cases = [Case(f"{count} tiles", (), {"pixel_values": given}) for count, given in counts.items()]
        shapes = {"pixel_values": {0: Dim.AUTO}}
        return Piece("vision_encoder", encoder, {"pixel_values": tiles}, cases, shapes, has_rows=False)
    images = [{"pixel_values": image[None]} for image in images_for(model, 3)]
    cases = [Case(f"image {number}", (), given) for number, given in enumerate(images[1:], 2)]
    return Piece("vision_encoder", encoder, images[0], cases, dynamic_shapes=None)


def with_pictures(model: TransformersModel, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Insert one picture into each prompt of the batch, between its padding and its text."""
    (encoder_kind, decoder_kind), count = vision_modules(model), len(inputs["input_ids"])
    if encoder_kind is GridVisionEncoder:
        # wide and high pictures alternate
        made = [grid_image(model, *((2, 3), (3, 2))[row % 2]) for row in range(count)]
        places = 6
    elif encoder_kind is TiledVisionEncoder:
        made = [tiled_image(model) for _ in range(count)]
        places = len(torch.cat(tuple(model.get_image_features(**made[0], return_dict=True).pooler_output)))
    else:
        images = images_for(model, count)[:, None]
        places = encoder_kind(model)(images[0])["image_features"].shape[-2]
        made = [{"pixel_values": image[None] if encoder_kind is NestedVisionEncoder else image} for image in images]
    pictures = {name: torch.cat([picture[name] for picture in made]) for name in made[0]}
    token = image_token_of(model)
    rows, masks = [], []
    for row, kept in zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True):
        rows.append(torch.cat([row[~kept], row.new_full((places,), token), row[kept]]))
        masks.append(torch.cat([torch.zeros_like(row[~kept]), torch.ones(places + int(kept.sum()), dtype=row.dtype)]))
    found = torch.stack(rows)
    if encoder_kind is GridVisionEncoder:
        pictures["mm_token_type_ids"] = torch.eq(found, token).long()
    elif decoder_kind is BlockwiseDecoder:
        pictures["token_type_ids"] = settings_of(model.config.to_dict(), {}).token_types(found)
    return {"input_ids": found, "attention_mask": torch.stack(masks), **pictures}


def images_for(model: TransformersModel, count: int) -> torch.Tensor:
    """Make random images of the size that the model accepts, of shape (count, channels, height, width)."""
    vision = model.config.vision_config
    size = getattr(vision, "image_size", None)
    sides = [size, size] if isinstance(size, int) else size
    if not isinstance(sides, (list, tuple)) or len(sides) != 2:
        raise GenerationError(
            f"{type(model).__qualname__} takes images of several sizes, but exported files take one size. {_OTHER_WAYS}"
        )
    shape = (count, getattr(vision, "num_channels", 3), *sides)
    return random_values(model, shape, count)


def image_token_of(model: TransformersModel) -> int:
    found = getattr(model.config, "image_token_id", None)
    return int(model.config.image_token_index if found is None else found)
