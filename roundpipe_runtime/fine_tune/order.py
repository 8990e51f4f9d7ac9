"""The order of training rows: new in each epoch and made from the seed, so that any batch can be found again."""

from __future__ import annotations

import torch

__all__ = ["Order"]

_STRIDE = 0x9E3779B97F4A7C15  # seeds that lie side by side give epochs that do not


class Order:
    """An endless sequence of rows: every row once in each epoch.

    A batch at the end of an epoch is filled from the next one, so all batches have the same size.

    Args:
        rows: indices of the rows.
        seed: seed of all orders.

    >>> order = Order(torch.arange(3), seed=0)
    >>> sorted(order[place] for place in range(3))
    [0, 1, 2]
    """

    def __init__(self, rows: torch.Tensor, *, seed: int) -> None:
        self.rows = rows
        self.seed = seed
        self._epoch = -1
        self._shuffled = rows

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
