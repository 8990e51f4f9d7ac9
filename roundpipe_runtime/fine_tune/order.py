"""The order of training rows: new in each epoch and made from the seed, so that any batch can be found again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

# Batches among whose rows neighbours are chosen: so many that lengths are close, and rows still meet others.
_BUCKET = 50

_STRIDE = 0x9E3779B97F4A7C15  # seeds that lie side by side give epochs that do not


class Order(Sampler[int]):
    """A sampler of rows: every row once in each epoch, for as many places as a training has.

    A batch at the end of an epoch is filled from the next one, so all batches have the same size.

    >>> order = Order(torch.arange(3), seed=0, count=6)
    >>> sorted(order[place] for place in range(3)), len(list(order))
    ([0, 1, 2], 6)
    """

    # count: number of places that iteration goes through. Default: one epoch.
    # lengths: tokens of each row, so that rows of similar length are neighbours. Default: they are alike.

    def __init__(
        self,
        rows: torch.Tensor,
        *,
        seed: int,
        count: int | None = None,
        lengths: torch.Tensor | None = None,
        batch: int = 1,
    ) -> None:
        self.rows = rows
        self.seed = seed
        self.count = len(rows) if count is None else count
        self.lengths, self.batch = lengths, batch
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
            if self.lengths is not None:
                self._shuffled = self._bucketed(self._shuffled, self.lengths, generator)
            self._epoch = epoch
        return self._shuffled

    def _bucketed(self, rows: torch.Tensor, lengths: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Sort each bucket of rows by length, and shuffle the batches that this makes."""
        buckets = [part[lengths[part].argsort(stable=True)] for part in rows.split(_BUCKET * self.batch)]
        batches = torch.cat(buckets).split(self.batch)
        return torch.cat([batches[int(number)] for number in torch.randperm(len(batches), generator=generator)])
