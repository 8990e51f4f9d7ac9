"""Pictures and videos of a prompt: the processor's tensors, and the features that replace their tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import InvalidArgumentError
from ..runners.runner import Runner
from .image_positions import Grids
from .slots import typed
from .tiles import Tiles


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a vision file made of all pictures, or all videos, of a prompt."""

    token_id: int  # the token that they replace
    features: torch.Tensor  # features of shape (tokens, hidden size)
    # features that layers add, of shape (tokens, layers, hidden size); `None` without them
    between: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class Pictures:
    """All pictures, or all videos, of a prompt, as the processor of a model returns them."""

    word: str  # `"image"` or `"video"`
    # pictures of shape (count, channels, height, width), or (rows, count, channels, height, width), where pictures of
    # zeros pad rows that have fewer; or patches of shape (patches, values); `None` for none
    pixels: torch.Tensor | None
    # patches of each in time, height and width, of shape (count, 3); height and width of each, of shape (count, 2),
    # where they are cut into tiles; `None` where all are of one size
    sizes: torch.Tensor | None
    token_id: int | None  # the token that they replace; `None` for a model without one
    spacing: Sequence[Any] = ()  # positions from one frame to the next, a number for each; 1 for all by default
    tiles: Tiles | None = None  # how they are cut, for a model that cuts them; `None` by default
    together: torch.Tensor | None = None  # the number of pictures of each prompt; `None`, the default, for one each

    @property
    def grids(self) -> list[Grids]:
        """The sizes, as positions are made of them; empty without pictures."""
        if self.pixels is None or self.sizes is None or self.tiles is not None:
            return []
        return [Grids(self.word, self.token_id, self.sizes, self.spacing)]

    def seen_by(self, vision: Runner | None, decoder: Runner, tokens: torch.Tensor) -> list[Seen]:
        """Return their features, as many as the prompt has tokens for them; none of no pictures."""
        # vision: the file from pictures to features; `None` for a model without one
        if self.pixels is None:
            return []
        if vision is None:
            raise InvalidArgumentError(f"{decoder.name} reads text only: leave pixel_values out.")
        found = [vision.step(typed(vision, inputs), {})[0] for inputs in self._calls(vision)]
        features = self._joined(found)
        token = self.token_id or 0
        places = int(torch.eq(tokens, token).sum())
        if places != len(features):
            raise InvalidArgumentError(
                f"The prompt has {places} {self.word} tokens (id {self.token_id}), the {self.word}s make "
                f"{len(features)}. Let the model's processor write the prompt."
            )
        between = [outputs["deepstack_features"] for outputs in found if "deepstack_features" in outputs]
        return [Seen(token, features, torch.cat(between) if between else None)]

    def _joined(self, found: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """The features of all pictures in the order of their tokens, of shape (tokens, hidden size)."""
        if self.tiles is None or self.sizes is None:
            return torch.cat([outputs["image_features"].flatten(0, -2) for outputs in found])
        newline = found[0]["image_newline"][0]
        return self.tiles.packed([outputs["image_features"] for outputs in found], newline, self.sizes)

    def _calls(self, vision: Runner) -> Iterator[dict[str, torch.Tensor]]:
        """The inputs of each call of the file, which takes one picture at a time: of a video, a frame."""
        assert self.pixels is not None
        if "image_grid_thw" not in vision.ports:
            if self.word == "video":
                raise InvalidArgumentError(
                    f"{vision.name} takes pictures of one size, and no videos: leave pixel_values_videos out."
                )
            if self.tiles is not None:
                yield from (
                    {"pixel_values": tiles} for tiles in self.tiles.split(self.pixels, self.sizes, self.together)
                )
                return
            for image in _without_padding(self.pixels):
                yield {"pixel_values": image[None]}
            return
        sizes, name = self.sizes, f"{self.word}_grid_thw"
        if sizes is None or sizes.ndim != 2 or int(sizes.prod(-1).sum()) != len(self.pixels):
            pixels, shape = ("pixel_values", "pictures") if self.word == "image" else ("pixel_values_videos", "videos")
            raise InvalidArgumentError(
                f"{vision.name} takes patches. Pass {name} of shape ({shape}, 3), whose products add up to the "
                f"{len(self.pixels)} rows of {pixels}, as the model's processor returns it."
            )
        if self.word == "image" and bool((sizes[:, 0] != 1).any()):
            raise InvalidArgumentError("image_grid_thw states several frames: pass videos as pixel_values_videos.")
        # the patches of a frame see each other, and none of another frame
        frames = sizes.repeat_interleave(sizes[:, 0], dim=0)
        frames[:, 0] = 1
        for patches, frame in zip(self.pixels.split(frames.prod(-1).tolist()), frames, strict=True):
            yield {"pixel_values": patches, "image_grid_thw": frame[None]}


def _without_padding(pixels: torch.Tensor) -> torch.Tensor:
    """Pictures of all rows in order; where rows hold several, without those of zeros, as SmolVLM leaves them out."""
    if pixels.ndim != 5:
        return pixels
    every = pixels.flatten(0, 1)
    seen = every.flatten(1).ne(0).any(1)
    return every[seen] if bool(seen.any()) else every[:1]
