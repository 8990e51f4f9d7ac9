"""Positions of tokens and pictures in time, height and width (M-RoPE), as Qwen2-VL counts them.

.. code-block:: text

    tokens   a  b  [2 x 3 tokens of a picture]  c         the picture begins where the text ends; the text goes on
    time     0  1   2 2 2 2 2 2                 5         after its longer side
    height   0  1   2 2 2 3 3 3                 5
    width    0  1   2 3 4 2 3 4                 5
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from ..errors import InvalidArgumentError

__all__ = ["image_positions"]


def image_positions(
    tokens: torch.Tensor, mask: torch.Tensor, grids: torch.Tensor | None, image_token_id: int | None, merge: int
) -> torch.Tensor:
    """Return the positions of a prompt.

    Args:
        tokens: integers of shape (batch, length).
        mask: integers of the same shape, 0 where a row is padded.
        grids: patches of each picture in time, height and width, of shape (pictures, 3), in the order of their tokens;
            ``None`` without pictures.
        image_token_id: the token that pictures replace.
        merge: patches per token, along each side.

    Returns:
        int64 of shape (3, batch, length); 0 where a row is padded.

    Raises:
        InvalidArgumentError: when the tokens of a picture are not as many as its grid states.
    """
    positions = torch.zeros(3, *tokens.shape, dtype=torch.int64)
    left = iter([] if grids is None else grids.tolist())
    for row, shown in enumerate(mask.bool()):
        parts = list(_parts(tokens[row][shown].tolist(), left, image_token_id if grids is not None else None, merge))
        positions[:, row, shown] = torch.cat(parts, dim=1)
    return positions


def _parts(tokens: list[int], grids: Iterator[list[int]], image: int | None, merge: int) -> Iterator[torch.Tensor]:
    at = 0
    for is_image, group in itertools.groupby(tokens, lambda token: token == image):
        count = len(list(group))
        if not is_image:
            yield torch.arange(at, at + count).expand(3, -1)
            at += count
            continue
        time, height, width = next(grids, [0, 0, 0])
        height, width = height // merge, width // merge
        if count != time * height * width:
            raise InvalidArgumentError(
                f"The prompt has {count} image tokens in a row, and image_grid_thw states {time * height * width} for "
                "that picture. Let the model's processor write the prompt."
            )
        axes = [torch.arange(size) for size in (time, height, width)]
        yield torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1) + at
        at += max(height, width)
