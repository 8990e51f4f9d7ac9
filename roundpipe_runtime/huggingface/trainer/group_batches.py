"""Cut the batches of a Trainer into groups of rows, which do not depend on the number of processes.

::

    the Trainer's own      each process a batch of its own; the last ones are filled up with rows from the beginning
    in groups              one batch of all processes, cut into groups; a last batch has fewer rows, none of them twice
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from ...device.outcome import Outcome
from ...distributed.ranks.errors import format_failure, raise_first
from ...distributed.ranks.ranks import Ranks
from ...distributed.replicas.sampler import ReplicaBatchSampler, collate_with_empty
from ...pipeline import RoundPipe

_KEPT = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


class GroupLoader(DataLoader[Any]):
    """A loader of this process's rows of each batch."""

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of an epoch, alike in all processes."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr] # it is a ReplicaBatchSampler


def take_together(batches: Iterator[Any], count: int, ranks: Ranks) -> list[Any]:
    """Take batches of this process; an error of one process is raised in all, which would wait for it otherwise."""
    # count: number to take; fewer are taken where there are no more
    found: list[Any] = []
    with Outcome() as outcome:
        found = list(itertools.islice(batches, count))
    failure = outcome.error
    raise_first(failure, ranks.exchange(None if failure is None else format_failure(failure)))
    return found


class CheckedLoader:
    """A loader whose errors in one process are raised in all."""

    def __init__(self, loader: Any, ranks: Ranks) -> None:
        self._loader, self._ranks = loader, ranks

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while taken := take_together(batches, 1, self._ranks):
            yield from taken

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def has_rows(loader: DataLoader[Any]) -> bool:
    """Report whether a loader draws rows, which groups can be made of; a stream, or batches of its own, are not."""
    # torch gives a stream a batch sampler also, whose sampler has no end
    return type(loader.batch_sampler) is BatchSampler and not isinstance(loader.dataset, IterableDataset)


def loader_of_groups(
    loader: DataLoader[Any], pipeline: RoundPipe, batch: int, data_seed: int | None = None
) -> GroupLoader:
    """Return a loader of this process's rows of batches that are cut into the pipeline's groups."""
    own: Any = loader.batch_sampler
    batches = BatchSampler(_seeded(own.sampler, data_seed), batch, own.drop_last)
    collate = loader.collate_fn
    tail = len(own.sampler) % batch
    if 0 < tail < pipeline.replicas and not own.drop_last:  # no row is left for some process
        collate = collate_with_empty(collate, loader.dataset[0])
    return GroupLoader(
        loader.dataset,
        batch_sampler=ReplicaBatchSampler(batches, pipeline),
        collate_fn=collate,
        **{name: getattr(loader, name) for name in _KEPT},
    )


def _seeded(sampler: Sampler[int], data_seed: int | None) -> Sampler[int]:
    """An order that depends on the epoch and a seed, as accelerate's, and not on how often it was drawn."""
    if type(sampler) is not RandomSampler:
        return sampler
    from accelerate.data_loader import SeedableRandomSampler

    made: Sampler[int] = SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator or torch.Generator(),
        data_seed=data_seed,
    )
    return made
