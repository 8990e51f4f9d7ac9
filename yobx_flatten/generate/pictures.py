"""Compute the features that replace the image and video tokens of a prompt."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import itertools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..core.files.document import damage_as
from ..errors import GenerationError, InvalidArgumentError, require
from ..huggingface.cache_names import CACHE
from ..runners.ports import CacheSlot, Port, Runner


@dataclasses.dataclass(frozen=True)
class Seen:
    token_id: int  # the token that the features replace
    features: torch.Tensor  # features of shape (tokens, hidden size)
    # features that decoder layers add, of shape (tokens, layers, hidden size); `None` if no layer adds features
    between: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class Pictures:
    """All pictures (or all videos) of a ``generate`` call, as tensors that the model's processor made."""

    word: str  # `"image"` or `"video"`
    # pictures of shape (count, channels, height, width); or (rows, count, channels, height, width), with pictures of
    # zeros as padding; or patches of shape (patches, values); `None` without pictures
    pixels: torch.Tensor | None
    # patches of each picture in time, height and width, of shape (count, 3); for tiled pictures height and width of
    # each picture, of shape (count, 2); `None` if all pictures have one size
    sizes: torch.Tensor | None
    token_id: int | None  # the token that features replace; `None` for a model without such a token
    spacing: Sequence[Any] = ()  # positions from one frame to the next, a number for each video; 1 for all by default
    tiles: Tiles | None = None  # for a model that cuts pictures into tiles
    together: torch.Tensor | None = None  # the number of pictures of each prompt; by default 1

    def __post_init__(self) -> None:
        if self.pixels is None and self.names:
            raise InvalidArgumentError(f"{self.names[0]} was passed, but no {self.word}s. Leave {self.names[0]} out.")

    @property
    def names(self) -> list[str]:
        """The names of ``generate`` arguments that contain these pictures and their sizes, such as ``pixel_values``."""
        pixels = "pixel_values" if self.word == "image" else "pixel_values_videos"
        sizes = f"{self.word}_grid_thw" if self.tiles is None else "image_sizes"
        found = {pixels: self.pixels, sizes: self.sizes, "batch_num_images": self.together}
        return [name for name, value in found.items() if value is not None]

    def seen_by(self, vision: Runner | None, decoder: Runner, tokens: torch.Tensor) -> list[Seen]:
        """Run the vision encoder; return a feature vector per image token, or an empty list without pictures."""
        if self.pixels is None:
            return []
        if vision is None:
            raise InvalidArgumentError(f"{decoder.name} reads text only: leave {self.names[0]} out.")
        found = [vision.step(typed(vision, inputs), {})[0] for inputs in self._calls(vision)]
        if self.tiles is None or self.sizes is None:
            features = torch.cat([outputs["image_features"].flatten(0, -2) for outputs in found])
        else:
            newline = found[0]["image_newline"][0]
            features = self.tiles.packed([outputs["image_features"] for outputs in found], newline, self.sizes)
        token = self.token_id or 0
        places = int(torch.eq(tokens, token).sum())
        if places != len(features):
            raise InvalidArgumentError(
                f"The prompt has {places} {self.word} tokens (id {self.token_id}), but the {self.word}s need "
                f"{len(features)}. Make the prompt with the model's processor."
            )
        between = [outputs["deepstack_features"] for outputs in found if "deepstack_features" in outputs]
        return [Seen(token, features, torch.cat(between) if between else None)]

    def _calls(self, vision: Runner) -> Iterator[dict[str, torch.Tensor]]:
        assert self.pixels is not None
        if "image_grid_thw" not in vision.ports:
            if self.tiles is None and (self.word == "video" or self.sizes is not None):
                raise InvalidArgumentError(f"{vision.name} reads images of one size. Omit image_grid_thw and videos.")
            if self.tiles is not None:
                calls = self.tiles.split(self.pixels, self.sizes, self.together)
            else:
                images = self.pixels
                if images.ndim == 5:  # rows of pictures, which SmolVLM pads with pictures of zeros
                    every = images.flatten(0, 1)
                    seen = every.flatten(1).ne(0).any(1)
                    images = every[seen] if bool(seen.any()) else every[:1]
                calls = [image[None] for image in images]
            yield from ({"pixel_values": pixels} for pixels in calls)
            return
        sizes, name = self.sizes, f"{self.word}_grid_thw"
        if sizes is None or sizes.ndim != 2 or int(sizes.prod(-1).sum()) != len(self.pixels):
            pixels, shape = ("pixel_values", "pictures") if self.word == "image" else ("pixel_values_videos", "videos")
            raise InvalidArgumentError(
                f"{name} must have shape ({shape}, 3): frames, height and width in patches. The patches of all {shape} "
                f"must add up to the {len(self.pixels)} rows of {pixels}. Pass {name} from the model's processor."
            )
        if self.word == "image" and bool((sizes[:, 0] != 1).any()):
            raise InvalidArgumentError("image_grid_thw has several frames: pass videos as pixel_values_videos.")
        # patches attend only to patches of the same frame
        frames = sizes.repeat_interleave(sizes[:, 0], dim=0)
        frames[:, 0] = 1
        for patches, frame in zip(self.pixels.split(frames.prod(-1).tolist()), frames, strict=True):
            yield {"pixel_values": patches, "image_grid_thw": frame[None]}


# Positions of tokens, pictures and videos in time, height and width (M-RoPE), as Qwen2-VL counts them.
def image_positions(tokens: torch.Tensor, mask: torch.Tensor, given: Sequence[Pictures], merge: int) -> torch.Tensor:
    """Return the M-RoPE positions of prompt tokens (time, height and width), of shape (3, batch, length)."""
    # mask: integers of the same shape, 0 where a row is padded
    positions = torch.zeros(3, *tokens.shape, dtype=torch.int64)
    # tokens of tiled pictures have the same positions as text
    left = {one.token_id: _Left(one, merge) for one in given if one.pixels is not None and one.tiles is None}
    for row, shown in enumerate(mask.bool()):
        parts, at = [], 0
        for token, group in itertools.groupby(tokens[row][shown].tolist(), lambda one: one if one in left else None):
            count = len(list(group))
            found, moved = (torch.arange(count).expand(3, -1), count) if token is None else left[token].next(count)
            parts.append(found + at)
            at += moved
        positions[:, row, shown] = torch.cat(parts, dim=1)
    return positions


class _Left:
    """A queue of the pictures (or videos) of a prompt whose tokens have no positions yet."""

    def __init__(self, pictures: Pictures, merge: int) -> None:
        self.word = pictures.word
        stated: list[list[int]] = [] if pictures.sizes is None else pictures.sizes.tolist()
        spacing = pictures.spacing if len(pictures.spacing) else [1] * len(stated)
        sizes = ([time, height // merge, width // merge] for time, height, width in stated)
        self.sizes = collections.deque(zip(sizes, spacing, strict=True))

    def next(self, count: int) -> tuple[torch.Tensor, int]:
        """Return M-RoPE positions, counted from 0, of the next picture's tokens and of the text token after them."""
        (time, height, width), spacing = self.sizes.popleft() if self.sizes else ([0, 0, 0], 1)
        if self.word == "video" and count == height * width and time > 1:
            # Qwen3-VL writes the time of each frame as text
            self.sizes.appendleft(([time - 1, height, width], spacing))
            time = 1
        if count != time * height * width:
            raise InvalidArgumentError(
                f"The prompt has {count} {self.word} tokens in a row, but {self.word}_grid_thw states a "
                f"{'picture' if self.word == 'image' else 'video'} of {time * height * width} tokens. Let the model's "
                "processor write the prompt."
            )
        axes = [(torch.arange(time) * spacing).long(), torch.arange(height), torch.arange(width)]
        return torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1), max(height, width)


TILED: Mapping[str, str] = {
    "llava_next": "LlavaNext",
    "llava_next_video": "LlavaNextVideo",
    "llava_onevision": "LlavaOnevision",
}
"""By type of a model that splits images into tiles: the prefix of the names of its transformers classes."""

_OF_THE_CALL = ("self", "image_features", "image_sizes", "image_newline")


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Separates the tiles into which a model (LLaVA-NeXT) cuts each picture, and joins the features of the tiles."""

    config: Mapping[str, Any] = dataclasses.field(repr=False)  # the contents of config.json

    def split(
        self, pixels: torch.Tensor, sizes: torch.Tensor | None, together: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Return the tiles of each picture, without padding tiles."""
        # pixels: tiles of shape (images, tiles, channels, height, width), or (tiles, channels, height, width)
        # sizes: height and width of each picture before it was cut, integers of shape (images, 2)
        # together: the number of pictures of each prompt; a picture is cut only if it is alone in its prompt
        if sizes is None or sizes.ndim != 2 or sizes.shape[1] != 2:
            raise InvalidArgumentError(
                "This model cuts images into tiles. Pass image_sizes of shape (images, 2), with height and width of "
                "each image, as the model's processor returns it."
            )
        counts = self.counts(sizes, together)
        if pixels.ndim == 5 and len(pixels) == len(counts) and max(counts) <= pixels.shape[1]:
            return [tiles[:count] for tiles, count in zip(pixels, counts, strict=True)]
        if pixels.ndim == 4 and len(pixels) == sum(counts):
            return list(pixels.split(counts))
        raise InvalidArgumentError(
            f"pixel_values has shape {tuple(pixels.shape)}, but image_sizes describes {len(counts)} pictures, cut "
            f"into {', '.join(map(str, counts))} tiles. Pass the output of the model's processor."
        )

    def packed(self, features: Sequence[torch.Tensor], newline: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Return the features of pictures in the order of a prompt's image tokens, of shape (tokens, hidden size)."""
        # features: features of each picture, of shape (tiles, tokens, hidden size)
        # newline: the feature that ends each row, of shape (hidden size,)
        config, pack = self._config_and_pack()
        names = [name for name in inspect.signature(pack).parameters if name not in _OF_THE_CALL]
        stated, owner = {name: getattr(config, name) for name in names}, types.SimpleNamespace(config=config)
        with damage_as(GenerationError, "config.json"):
            found, _ = pack(owner, list(features), sizes, image_newline=newline, **stated)
        return torch.cat(tuple(found))

    def counts(self, sizes: torch.Tensor, together: torch.Tensor | None) -> list[int]:
        config, pack = self._config_and_pack()
        count_of = vars(sys.modules[pack.__module__])["image_size_to_num_patches"]
        of_rows = [1] * len(sizes) if together is None else [n for n in together.flatten().tolist() for _ in range(n)]
        if len(of_rows) != len(sizes):
            raise InvalidArgumentError(
                f"The numbers in batch_num_images add up to {len(of_rows)}, but image_sizes has {len(sizes)} rows. "
                "Pass both as the model's processor returns them."
            )
        with damage_as(GenerationError, "config.json"):
            return [
                int(count_of(size, config.image_grid_pinpoints, config.vision_config.image_size)) if row == 1 else 1
                for size, row in zip(sizes.tolist(), of_rows, strict=True)
            ]

    def _config_and_pack(self) -> tuple[Any, Any]:
        require("transformers", purpose="pictures in tiles", extra="transformers")
        import transformers

        name = TILED[self.config["model_type"]]
        with damage_as(GenerationError, "config.json"):
            config = getattr(transformers, f"{name}Config").from_dict(dict(self.config))
        return config, getattr(transformers, f"{name}Model").pack_image_features


# Leaves of a cache that are empty or zero before the first token: a convolution pads with zeros, and a recurrence
# starts from zero.
_EMPTY_AT_FIRST = {"key", "value", "length", "position", "conv_states", "recurrent_states"}


def empty_cache(slots: Iterable[CacheSlot], batch: int) -> dict[str, torch.Tensor]:
    """Return an empty KV cache by input name: every dynamic axis has size 0, except the batch axis."""
    made = {}
    for slot in slots:
        name, shape, dtype = slot.port
        part = name.rstrip("0123456789").rstrip(".").rpartition(".")[2]  # a layer can have several states
        if part not in _EMPTY_AT_FIRST:
            raise GenerationError(
                f"The value of {name} before the first token is not known, so the file with this input cannot read a "
                "prompt. Pass a file without cache inputs for the prompt:\n    OnnxGenerator(path, prefill=prompt_path)"
            )
        # axis 0 is the batch, and every other size that varies is a number of tokens
        sizes = [batch if axis == 0 and size is None else size or 0 for axis, size in enumerate(shape)]
        if shape and sizes[0] != batch:
            raise GenerationError(f"{name} was exported for {sizes[0]} rows, found {batch}. Pass {sizes[0]} rows.")
        made[name] = torch.zeros(sizes, dtype=dtype)
    return made


def check_ports(ports: Mapping[str, Port], known: Iterable[str], where: str) -> None:
    unknown = [name for name in ports if name not in set(known)]
    if unknown:
        raise GenerationError(
            f"{where} has the inputs {', '.join(unknown)}, which a generation loop does not pass. A generation loop "
            f"passes only {', '.join(sorted(known))} and the KV cache ({CACHE}.*). Export without the other inputs."
        )
    text = [name for name, port in ports.items() if port.dtype is None]
    if text:
        raise GenerationError(
            f"In {where}, the inputs {', '.join(text)} are strings or sequences, but a generation loop passes numeric "
            "tensors only."
        )


def typed(runner: Runner, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: made[name].to(port.dtype) for name, port in runner.ports.items() if name in made}
