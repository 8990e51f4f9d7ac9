"""Read the rows of a training, from text or conversations, and hold some of them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Rows(Protocol):
    """Rows of tokens, which are numbered."""

    @property
    def training(self) -> torch.Tensor:
        """Indices of the training rows."""

    @property
    def held_out(self) -> torch.Tensor:
        """Indices of the rows that only evaluation reads."""

    @property
    def digest(self) -> str:
        """A digest that is equal for the same rows."""

    @property
    def length(self) -> int:
        """Tokens of the longest row that there may be."""

    @property
    def lengths(self) -> torch.Tensor | None:
        """Tokens of each row, which batches are sorted by; ``None`` if all are as long."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        """The arguments of the model for a row."""

    def collate(self, rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the arguments of the model for a batch."""

    def tokens_in(self, rows: Sequence[int]) -> int:
        """Return the number of tokens of some rows."""


def split_rows(count: int, *, eval_share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of rows for training, and of those that are held out for evaluation.

    >>> [len(part) for part in split_rows(10, eval_share=0.25, seed=0)]
    [8, 2]
    """
    # eval_share: share of held-out rows, from 0 to 1; at least one row is held out unless it is 0, and at least one is
    # left for training where there are two
    held_out = min(max(1, round(eval_share * count)), count - 1) if eval_share > 0 else 0
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[held_out:].sort().values, order[:held_out].sort().values
