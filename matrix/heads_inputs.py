"""What a class with a head reads, in the forms that there are: texts, pictures, films, sounds, series."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch

from .media import IMAGE_TOKEN, features_shape

__all__ = ["inputs_of"]

Batch = dict[str, Any]
_LENGTH = 12
_PADDING = 3
_CHOICES = 3


def inputs_of(task: str, model: Any, rows: int, generator: torch.Generator) -> Iterator[Batch]:
    """Yield what a model may read, likeliest first.

    Args:
        task: the task of its head.
        model: the model.
        rows: the rows of a batch.
        generator: the generator of the numbers.
    """
    maker = _Inputs(model, rows, generator)
    text = maker.choices() if task == "multiple_choice" else maker.text()
    for media in maker.media(task):
        yield {**text, **media}
    if text and "inputs_embeds" not in text:
        yield text


class _Inputs:
    def __init__(self, model: Any, rows: int, generator: torch.Generator) -> None:
        self.model, self.config, self.rows, self.generator = model, model.config, rows, generator
        self.taken = inspect.signature(model.forward).parameters

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn((self.rows, *shape), generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (self.rows, *shape), generator=self.generator)

    def read(self, *names: str, default: Any = None) -> Any:
        """A field of the configuration, or of one of those in it."""
        inner = [value for value in vars(self.config).values() if hasattr(value, "to_dict")]
        for name in names:
            for config in (self.config, *inner):
                value = getattr(config, name, None)
                if isinstance(value, (int, float, str, list, tuple)) and not isinstance(value, bool):
                    return value
        return default

    # -- texts

    def text(self) -> Batch:
        """Tokens with a mask, and what stands next to each of them."""
        name = "input_ids" if "input_ids" in self.taken else None
        if name is None:
            return {}
        text = self.config.get_text_config(decoder=True)
        high = min(getattr(text, "vocab_size", None) or 100, IMAGE_TOKEN)
        tokens = self.integers(min(4, high - 1), high, _LENGTH)
        made = {name: tokens}
        ends = getattr(self.config, "eos_token_id", None)
        if getattr(self.config, "is_encoder_decoder", False) and isinstance(ends, int):
            tokens[:, -1] = ends  # heads read what stands there
        if self.config.model_type == "longformer":  # it looks for the end of the question
            tokens[:, [3, 4, -4]] = self.config.sep_token_id
        if "grounding" in self.config.model_type:  # a phrase begins and ends with a token of BERT
            tokens[:, [0, 6, -1]] = torch.tensor([101, 102, 102])
        if "attention_mask" in self.taken:
            mask = torch.ones_like(tokens)
            mask[0, _LENGTH - _PADDING : _LENGTH - 1] = 0
            if not getattr(self.config, "is_encoder_decoder", False):
                mask[0, -1] = 0
            made["attention_mask"] = mask
        if "bbox" in self.taken:
            corners = self.integers(0, 20, _LENGTH, 4).sort(-1).values
            made["bbox"] = corners if self.config.model_type != "bros" else corners / 20.0
        if "langs" in self.taken:
            made["langs"] = torch.zeros_like(tokens)
        for key in ("input_shape_ids", "input_pronunciation_ids"):
            if key in self.taken:
                made[key] = tokens % 16
        if "entity_ids" in self.taken:
            made["entity_ids"] = self.integers(1, 10, 2)
            made["entity_attention_mask"] = torch.ones_like(made["entity_ids"])
            positions = torch.full((self.rows, 2, 4), -1)
            positions[..., :2] = self.integers(0, 8, 2, 2)
            made["entity_position_ids"] = positions
        return made

    def choices(self) -> Batch:
        """Several texts in each row."""
        made = self.text()
        return {
            name: value[:, None].repeat(1, _CHOICES, *[1] * (value.dim() - 1)).roll(1, -1 if value.dim() == 2 else 1)
            if name != "input_ids"
            else torch.stack([value.roll(choice, 1) for choice in range(_CHOICES)], 1)
            for name, value in made.items()
        }

    # -- all else

    def media(self, task: str) -> Iterator[Batch]:
        """Pictures, films, sounds and series; nothing for a class that reads a text only."""
        found = False
        for name, form in (
            ("pixel_values", self._pictures),
            ("pixel_values_videos", self._films),
            ("image", self._pictures),
            ("input_features", self._features),
            ("input_values", self._sounds),
            ("flattened_patches", self._patches),
            ("past_values", self._series),
            ("inputs", self._perceiver),
        ):
            if name in self.taken:
                for made in form(name, task):
                    found = True
                    yield {**made, **self._drawn(made)}
        if "visual_embeds" in self.taken:
            found = True
            seen = self.random(3, int(self.read("visual_embedding_dim", default=32)))
            mask = torch.ones(self.rows, 3, dtype=torch.int64)
            yield {"visual_embeds": seen, "visual_attention_mask": mask, "visual_token_type_ids": mask}
        if "visual_feats" in self.taken:
            found = True
            yield {"visual_feats": self.random(4, self.config.visual_feat_dim), "visual_pos": self.random(4, 4)}
        if not found:
            yield {}

    def _pictures(self, name: str, task: str) -> Iterator[Batch]:
        channels = int(self.read("num_channels", default=3))
        size = self.read("image_size", "img_size", "crop_size", default=32)
        first = tuple(size)[:2] if isinstance(size, (list, tuple)) else (int(size), int(size))
        frames = self.read("num_frames", "frames_per_clip", "num_image_with_embedding")
        for height, width in dict.fromkeys([first, (32, 32), (64, 64), (96, 96), (224, 224)]):
            picture = {name: self.random(channels, height, width)}
            if isinstance(frames, int):
                yield {name: self.random(frames, channels, height, width)}
            if "prompt_depth" in self.taken:
                picture["prompt_depth"] = self.random(1, height, width).abs()
            if "pixel_attention_mask" in self.taken and "spatial_shapes" in self.taken:
                patch = int(self.read("patch_size", default=14))
                shape = torch.tensor([[2, 2]] * self.rows)
                yield {
                    name: self.random(4, channels * patch * patch),
                    "pixel_attention_mask": torch.ones(self.rows, 4, dtype=torch.int64),
                    "spatial_shapes": shape,
                }
            if "image_sizes" in self.taken:
                picture["image_sizes"] = torch.tensor([[height, width]] * self.rows)
            yield picture
            if task in ("keypoint_matching",):
                yield {name: self.random(2, channels, height, width)}

    def _films(self, name: str, task: str) -> Iterator[Batch]:
        for made in self._pictures(name, task):
            if made[name].dim() == 5:
                yield made
        size = int(self.read("image_size", "img_size", "crop_size", default=32))
        yield {name: self.random(4, int(self.read("num_channels", "in_chans", default=3)), size, size)}

    def _drawn(self, made: Batch) -> Batch:
        """What a model would draw in its forward: which patches are hidden, noise."""
        drawn: Batch = {}
        pixels = made.get("pixel_values")
        if pixels is None:
            return drawn
        patch, tubelet = self.read("patch_size", default=16), self.read("tubelet_size", default=1)
        tubelet = tubelet[0] if isinstance(tubelet, (list, tuple)) else tubelet
        patch = patch[0] if isinstance(patch, (list, tuple)) else int(patch)
        count = (pixels.shape[-2] // patch) * (pixels.shape[-1] // patch)
        if pixels.dim() == 5:
            count *= pixels.shape[1] // int(tubelet)
        if "bool_masked_pos" in self.taken:
            hidden = torch.zeros(self.rows, count, dtype=torch.bool)
            for row in range(self.rows):  # films hide as many patches in each row, pictures some
                many = count // 2 if pixels.dim() == 5 else 1 + row % max(count - 1, 1)
                hidden[row, torch.randperm(count, generator=self.generator)[:many]] = True
            drawn["bool_masked_pos"] = hidden
        units = self.read("masked_unit_size")
        if units is not None:  # of several patches each, which are hidden together
            sides = zip(pixels.shape[-2:], self.config.patch_stride, units, strict=True)
            count = math.prod(side // stride // unit for side, stride, unit in sides)
        if "noise" in self.taken:
            drawn["noise"] = torch.rand((self.rows, count), generator=self.generator)
        return drawn

    def _features(self, name: str, task: str) -> Iterator[Batch]:
        yield from self._masked({name: self.random(*features_shape(self.config, self.rows)[1:])})
        for bins in (80, 128, 160, 16, 64):
            yield from self._masked({name: self.random(64, bins)})
            yield {name: self.random(bins, 64)}

    def _sounds(self, name: str, task: str) -> Iterator[Batch]:
        bins = self.read("num_mel_bins")
        if isinstance(bins, int) and isinstance(length := self.read("max_length"), int):
            yield {name: self.random(length, bins)}
        for length in (1600, 4000):
            yield from self._masked({name: self.random(length)})
        yield from self._masked({name: self.random(1, 4000)})

    def _masked(self, made: Batch) -> Iterator[Batch]:
        """The same with a mask: sounds of which the first is shorter; then without one."""
        if "attention_mask" in self.taken and "input_ids" not in self.taken:
            sound = next(iter(made.values()))
            mask = torch.ones(self.rows, sound.shape[-1] if sound.dim() == 2 else sound.shape[1], dtype=torch.int64)
            if sound.dim() == 3 and sound.shape[1] == 1:
                mask = torch.ones(self.rows, sound.shape[-1], dtype=torch.int64)
            mask[0, mask.shape[1] * 3 // 4 :] = 0
            yield {**made, "attention_mask": mask}
        yield made

    def _patches(self, name: str, task: str) -> Iterator[Batch]:
        width = int(self.read("patch_embed_hidden_size", default=768))
        made = self.random(9, width + 2)
        made[..., :2] = torch.cartesian_prod(torch.arange(1.0, 4.0), torch.arange(1.0, 4.0))
        yield {name: made}

    def _series(self, name: str, task: str) -> Iterator[Batch]:
        length = int(self.read("context_length", default=32))
        channels = int(self.read("num_input_channels", "input_size", default=1))
        made = {name: self.random(length, channels)}
        if "past_time_features" in self.taken:
            past = length + max(getattr(self.config, "lags_sequence", [0]))
            ahead = self.config.prediction_length
            features = self.config.num_time_features
            yield {
                name: self.random(past) if channels == 1 else self.random(past, channels),
                "past_time_features": self.random(past, features),
                "past_observed_mask": torch.ones(self.rows, past, *[channels] * (channels > 1)),
                "future_time_features": self.random(ahead, features),
            }
        if "past_observed_mask" in self.taken:
            made["past_observed_mask"] = torch.ones_like(made[name])
        if "freq" in self.taken:
            yield {name: self.random(length), "freq": self.integers(0, 3)}
        yield made
        yield {name: self.random(length)}

    def _perceiver(self, name: str, task: str) -> Iterator[Batch]:
        yield {name: self.integers(4, 100, _LENGTH)}
        size = int(self.read("image_size", default=28))
        yield {name: self.random(3, size, size)}
        yield {name: self.random(2, 27, 16, 24)}
