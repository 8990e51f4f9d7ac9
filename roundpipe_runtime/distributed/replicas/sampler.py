"""Choose which rows of each global batch a rank trains."""

# global batch   rows 5 2 9 0 7 | 4 1 8 3 6        the same draw on all ranks, from one seed
# 4 groups       5 2 | 9 | 0 | 7                   groups of rows, whatever the number of ranks
# 2 ranks        rank 0: 5 2 0     rank 1: 9 7     groups 0 and 2; groups 1 and 3
# 1 rank         5 2 9 0 7

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from yobx_flatten.core.private_names.of_torch import pytree

from ...errors import ConfigError
from .reduction import rows_of_rank


class ReplicaBatchSampler(Sampler[list[int]]):
    """A ``batch_sampler`` for a ``DataLoader`` that gives each rank its share of the rows of each batch.

    A global batch is split into ``replicas`` groups of rows, with the sizes that ``torch.tensor_split`` gives. Rank
    ``r`` gets the groups of rows with the numbers ``r``, ``r + size``, ``r + 2 * size`` and so on. The groups, and
    therefore the results of a training, do not depend on the number of ranks. If the last batch has too few rows for
    all ranks, some ranks get an empty list of rows (see :func:`collate_with_empty`).

    Args:
        batches: a ``BatchSampler``, or any iterable that can be iterated several times. For each global batch, it
            yields a list of indices of data set rows. All ranks need the same lists.
        model: pipeline with a mesh, from which ``replicas``, ``rank`` and ``size`` are read.
        replicas: number of groups of rows into which each global batch is split.
        rank: rank of this process.
        size: number of ranks.

    Raises:
        ConfigError: neither ``model`` nor ``replicas``, ``rank`` and ``size`` are given, or a number is out of range.

    >>> from torch.utils.data import BatchSampler, SequentialSampler
    >>> batches = BatchSampler(SequentialSampler(range(8)), batch_size=5, drop_last=False)
    >>> list(ReplicaBatchSampler(batches, replicas=2, rank=0, size=2))
    [[0, 1, 2], [5, 6]]
    >>> list(ReplicaBatchSampler(batches, replicas=2, rank=1, size=2))
    [[3, 4], [7]]
    >>> list(ReplicaBatchSampler(batches, replicas=2, rank=0, size=1))
    [[0, 1, 2, 3, 4], [5, 6, 7]]
    """

    def __init__(
        self,
        batches: Iterable[Sequence[int]],
        model: Any = None,
        *,
        replicas: int | None = None,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        if model is not None:
            rank = model.ranks.rank if rank is None else rank
            size = model.ranks.size if size is None else size
        if (replicas is None and model is None) or rank is None or size is None:
            raise ConfigError(
                "ReplicaBatchSampler needs a pipeline with a mesh, or else replicas=, rank= and size=. Write one of:\n"
                "    ReplicaBatchSampler(batches, model)\n"
                "    ReplicaBatchSampler(batches, replicas=8, rank=dist.get_rank(), size=dist.get_world_size())"
            )
        if (replicas is not None and replicas < 1) or not 0 <= rank < size:
            raise ConfigError(f"rank={rank} must be from 0 to {size - 1}, and replicas={replicas} at least 1.")
        self.batches = batches
        self.rank, self.size = rank, size
        self._model, self._replicas = model, replicas

    @property
    def replicas(self) -> int:
        """The number of replicas; each replica gets one group of rows of a batch. The default is ``model.replicas``."""
        # read from the pipeline each time, since a loaded checkpoint can change it
        replicas: int = self._model.replicas if self._replicas is None else self._replicas
        return replicas

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(self.batches):
            rows = list(batch)
            if number == 0 and self._model is not None and self.size > 1:
                digest = hashlib.sha256(repr([int(row) for row in rows]).encode()).hexdigest()
                digests = self._model.ranks.exchange(digest)
                other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
                if other is not None:
                    raise ConfigError(
                        f"Rank {other} draws different rows than rank 0 for the first batch. All ranks must draw the "
                        "same global batches, from one seed:\n"
                        "    RandomSampler(data, generator=torch.Generator().manual_seed(0))"
                    )
            yield [rows[place] for place in rows_of_rank(len(rows), self.rank, self.size, self.replicas)]

    def __len__(self) -> int:
        """Return the number of global batches, which is the same on all ranks."""
        return len(self.batches)  # type: ignore[arg-type] # TypeError without a length

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of ``batches`` or of the sampler in ``batches``, if there is such a method."""
        for drawn in (self.batches, getattr(self.batches, "sampler", None)):
            if callable(getattr(drawn, "set_epoch", None)):
                drawn.set_epoch(epoch)  # type: ignore[union-attr] # it was looked up
                return


def collate_with_empty(collate_fn: Callable[[list[Any]], Any], row: Any) -> Callable[[list[Any]], Any]:
    """Return a ``collate_fn`` that also accepts an empty list, since the last batch may have fewer rows than ranks.

    Args:
        collate_fn: function that makes a batch of rows, ``torch.utils.data.default_collate`` for example.
        row: any row of the data set, which determines the shapes of an empty batch.

    Returns:
        The function.

    >>> collate = collate_with_empty(torch.utils.data.default_collate, {"x": torch.zeros(3), "y": 1})
    >>> {name: tuple(value.shape) for name, value in collate([]).items()}
    {'x': (0, 3), 'y': (0,)}
    """

    def collate(rows: list[Any]) -> Any:
        if rows:
            return collate_fn(rows)
        return pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor[:0] if tensor.dim() else tensor, collate_fn([row])
        )

    return collate
