"""The order of training rows: new in each epoch and made from the seed, so that any batch can be found again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

__all__ = ["Order"]

_STRIDE = 0x9E3779B97F4A7C15  # seeds that lie side by side give epochs that do not


class Order(Sampler[int]):
    """A sampler of rows: every row once in each epoch, for as many places as a training has.

    A batch at the end of an epoch is filled from the next one, so all batches have the same size.

    Args:
        rows: indices of the rows.
        seed: seed of all orders.
        count: number of places that iteration goes through. Default: one epoch.

    >>> order = Order(torch.arange(3), seed=0, count=6)
    >>> sorted(order[place] for place in range(3)), len(list(order))
    ([0, 1, 2], 6)
    """

    def __init__(self, rows: torch.Tensor, *, seed: int, count: int | None = None) -> None:
        self.rows = rows
        self.seed = seed
        self.count = len(rows) if count is None else count
        self._epoch = -1
        self._shuffled = rows

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return (self[place] for place in range(self.count))

    def __getitem__(self, place: int) -> int:
        """The index of the row at a place in the sequence; 0 is the first row of the first epoch."""
        epoch, number = divmod(place, len(self.rows))
        return int(self._of_epoch(epoch)[number])

    def _of_epoch(self, epoch: int) -> torch.Tensor:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self.seed + _STRIDE * (epoch + 1)) % 2**63)
            self._shuffled = self.rows[torch.randperm(len(self.rows), generator=generator)]
            self._epoch = epoch
        return self._shuffled
