"""Positions of tokens, pictures and videos in time, height and width (M-RoPE), as Qwen2-VL counts them.

.. code-block:: text

    tokens   a  b  [2 x 3 tokens of a picture]  c         the picture begins where the text ends; the text goes on
    time     0  1   2 2 2 2 2 2                 5         after its longer side
    height   0  1   2 2 2 3 3 3                 5
    width    0  1   2 3 4 2 3 4                 5
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class Grids:
    """The sizes of all pictures of a prompt, or of all its videos."""

    word: str  # `"image"` or `"video"`
    token_id: int | None  # the token that they replace
    # patches of each in time, height and width: integers of shape (count, 3), in the order of their tokens
    sizes: torch.Tensor
    spacing: Sequence[Any] = ()  # positions from one frame to the next, a number for each; 1 for all by default


def image_positions(tokens: torch.Tensor, mask: torch.Tensor, given: Sequence[Grids], merge: int) -> torch.Tensor:
    """Return the positions of a prompt."""
    # mask: integers of the same shape, 0 where a row is padded
    # given: pictures and videos; empty without them
    positions = torch.zeros(3, *tokens.shape, dtype=torch.int64)
    left = {grids.token_id: _Left(grids, merge) for grids in given}
    for row, shown in enumerate(mask.bool()):
        positions[:, row, shown] = torch.cat(list(_parts(tokens[row][shown].tolist(), left)), dim=1)
    return positions


class _Left:
    """Pictures or videos whose tokens have not been met yet."""

    def __init__(self, grids: Grids, merge: int) -> None:
        self.word = grids.word
        spacing = grids.spacing if len(grids.spacing) else [1] * len(grids.sizes)
        sizes = ([time, height // merge, width // merge] for time, height, width in grids.sizes.tolist())
        self.sizes = collections.deque(zip(sizes, spacing, strict=True))

    def next(self, count: int) -> tuple[torch.Tensor, int]:
        """Return the positions of so many tokens from 0 on, and how far the text is moved by them."""
        (time, height, width), spacing = self.sizes.popleft() if self.sizes else ([0, 0, 0], 1)
        if self.word == "video" and count == height * width and time > 1:
            # Qwen3-VL writes the time of each frame as text
            self.sizes.appendleft(([time - 1, height, width], spacing))
            time = 1
        if count != time * height * width:
            raise InvalidArgumentError(
                f"The prompt has {count} {self.word} tokens in a row, and {self.word}_grid_thw states "
                f"{time * height * width} for that {'picture' if self.word == 'image' else 'video'}. Let the model's "
                "processor write the prompt."
            )
        axes = [(torch.arange(time) * spacing).long(), torch.arange(height), torch.arange(width)]
        return torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1), max(height, width)


def _parts(tokens: list[int], left: Mapping[int | None, _Left]) -> Iterator[torch.Tensor]:
    at = 0
    for token, group in itertools.groupby(tokens, lambda token: token if token in left else None):
        count = len(list(group))
        if token is None:
            yield torch.arange(at, at + count).expand(3, -1)
            at += count
        else:
            found, moved = left[token].next(count)
            yield found + at
            at += moved
