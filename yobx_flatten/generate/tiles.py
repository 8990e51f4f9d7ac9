"""Order the features of tiles in a prompt as transformers does (LLaVA-NeXT).

.. code-block:: text

    picture ──> the whole, small + tiles ──> vision file ──> features ──> packed: the whole, rows of all tiles without
                (images, tiles, 3, h, w)                                  what padded the picture, each with a newline
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import GenerationError, InvalidArgumentError
from ..errors.dependencies import require
from ..files.damage import damage_as

TILED: Mapping[str, str] = {
    "llava_next": "LlavaNext",
    "llava_next_video": "LlavaNextVideo",
    "llava_onevision": "LlavaOnevision",
}
"""By type of a model, what the names of its classes begin with."""

_OF_THE_CALL = ("self", "image_features", "image_sizes", "image_newline")


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a model cuts pictures and packs their features."""

    config: Mapping[str, Any] = dataclasses.field(repr=False)  # the configuration of the model, as it is written

    @staticmethod
    def of(config: Mapping[str, Any]) -> Tiles | None:
        """Return those of a configuration; ``None`` for a model whose pictures are not cut."""
        return Tiles(config) if config.get("model_type") in TILED else None

    def split(
        self, pixels: torch.Tensor, sizes: torch.Tensor | None, together: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Return the tiles of each picture, without those that pad."""
        # pixels: tiles of shape (images, tiles, channels, height, width), or (tiles, channels, height, width)
        # sizes: height and width of each picture before it was cut, integers of shape (images, 2)
        # together: the number of pictures of each prompt, where that is known: of several none is cut
        if sizes is None or sizes.ndim != 2 or sizes.shape[1] != 2:
            raise InvalidArgumentError(
                "This model cuts pictures into tiles. Pass image_sizes of shape (images, 2), height and width of each, "
                "as the model's processor returns it."
            )
        counts = self._counts(sizes, together)
        if pixels.ndim == 5 and len(pixels) == len(counts) and max(counts) <= pixels.shape[1]:
            return [tiles[:count] for tiles, count in zip(pixels, counts, strict=True)]
        if pixels.ndim == 4 and len(pixels) == sum(counts):
            return list(pixels.split(counts))
        raise InvalidArgumentError(
            f"pixel_values has shape {tuple(pixels.shape)}, and image_sizes states {len(counts)} pictures of "
            f"{', '.join(map(str, counts))} tiles. Pass what the model's processor returns."
        )

    def count(self, sizes: torch.Tensor) -> int:
        """Return the number of tiles of some pictures, each alone in its prompt."""
        # sizes: height and width of each, integers of shape (images, 2)
        return sum(self._counts(sizes, None))

    def packed(self, features: Sequence[torch.Tensor], newline: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Return features as they stand in prompts, of shape (tokens, hidden size)."""
        # features: features of each picture, of shape (tiles, tokens, hidden size)
        # newline: what ends each row, of shape (hidden size,)
        owner, config, pack = self._classes()
        names = [name for name in inspect.signature(pack).parameters if name not in _OF_THE_CALL]
        stated = {name: getattr(config, name) for name in names}
        with damage_as(GenerationError, "config.json"):
            found, _ = pack(owner, list(features), sizes, image_newline=newline, **stated)
        return torch.cat(tuple(found))

    def _counts(self, sizes: torch.Tensor, together: torch.Tensor | None) -> list[int]:
        """The number of tiles of each picture, the whole one among them."""
        _, config, pack = self._classes()
        count_of = vars(sys.modules[pack.__module__])["image_size_to_num_patches"]
        of_rows = [1] * len(sizes) if together is None else [n for n in together.flatten().tolist() for _ in range(n)]
        if len(of_rows) != len(sizes):
            raise InvalidArgumentError(
                f"batch_num_images states {len(of_rows)} pictures, image_sizes {len(sizes)}. Pass what the model's "
                "processor returns."
            )
        with damage_as(GenerationError, "config.json"):
            return [
                int(count_of(size, config.image_grid_pinpoints, config.vision_config.image_size)) if row == 1 else 1
                for size, row in zip(sizes.tolist(), of_rows, strict=True)
            ]

    def _classes(self) -> tuple[Any, Any, Any]:
        """What stands for the model, its configuration, and the method that packs."""
        require("transformers", purpose="pictures in tiles", extra="transformers")
        import transformers

        name = TILED[self.config["model_type"]]
        with damage_as(GenerationError, "config.json"):
            config = getattr(transformers, f"{name}Config").from_dict(dict(self.config))
        return types.SimpleNamespace(config=config), config, getattr(transformers, f"{name}Model").pack_image_features
