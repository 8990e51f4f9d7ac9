"""A Trainer that reads its data in groups of rows, so that a batch is that of all processes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler
from transformers import Trainer, TrainingArguments

from ...device.outcome import Outcome
from ...distributed.ranks.errors import format_failure, raise_first
from ...distributed.ranks.ranks import Ranks
from ...distributed.replicas.sampler import ReplicaBatchSampler, collate_with_empty
from ...errors import ConfigError
from ...pipeline import RoundPipe
from .pipeline_trainer import PipelineTrainer


class GroupTrainer(PipelineTrainer):
    """A Trainer whose batches are those of all processes."""

    compute_loss_func: Any

    def get_train_dataloader(self) -> Any:
        """Return the loader of this process's rows; in groups, of which a batch of all processes is made.

        A ``compute_loss`` of a subclass may compare rows, so each process gives it the batches of the plain Trainer.
        """
        if not self._rp_has_groups():
            return super().get_train_dataloader()
        if self.args.world_size > 1 and self._rp_has_other_loss():
            if self.pipeline.replicas != self.args.world_size:
                raise ConfigError(
                    f"{type(self).__name__} computes its own loss, of the rows of one process, so a batch has as "
                    f"many groups as there are processes, {self.args.world_size}. Leave "
                    f"replicas={self.pipeline.replicas} out."
                )
            return super().get_train_dataloader()
        prepare = self.accelerator.prepare
        self.accelerator.prepare = lambda loader: loader
        try:
            loader = super().get_train_dataloader()
        finally:
            self.accelerator.prepare = prepare
        if not has_rows(loader):
            return super().get_train_dataloader()
        seed = getattr(self.args, "data_seed", None)
        return loader_of_groups(loader, self.pipeline, self._rp_global_batch(), seed)

    def _rp_has_other_loss(self) -> bool:
        """Whether other code computes the loss or the step of a batch, from the joined output of a process's rows."""
        # A step that comes after this class, of `class Own(RoundPipeTrainer, Mine)`, calls that of a Trainer.
        methods = ("compute_loss", self.compute_loss), ("training_step", super().training_step)
        return self.compute_loss_func is not None or not all(_is_of_trainer(*method) for method in methods)

    @contextlib.contextmanager
    def _rp_failing_together(self) -> Iterator[None]:
        """Raise an error before the backward of one process in all, which would wait for it there."""
        self._rp_is_before_backward = True
        try:
            yield
        except Exception as error:
            if self._rp_is_before_backward and self.args.world_size > 1:
                self.pipeline.ranks.exchange(format_failure(error))
            raise

    def _rp_backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self._rp_is_before_backward = False
        raise_first(None, self.pipeline.ranks.exchange(None))
        super()._rp_backward(loss, **kwargs)

    def _rp_global_batch(self) -> int:
        """The rows of a batch of all processes."""
        rows: int = self._train_batch_size
        return rows * self.pipeline.replicas

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the rows of a step of all processes."""
        if not self._rp_has_groups():
            total: int = super().get_total_train_batch_size(args)
            return total
        return self._rp_global_batch() * int(args.gradient_accumulation_steps)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any) -> Any:
        """Return the batches of a step; an error in one process is raised in all.

        Args:
            epoch_iterator: iterator over the batches of an epoch.
            num_batches: number of batches of a step.
            *args: further arguments of a Trainer.
        """
        taken = take_together(epoch_iterator, num_batches, self.pipeline.ranks)
        return super().get_batch_samples(iter(taken), num_batches, *args)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, as the Trainer does. The model has the weights of the last step before: generation runs on it."""
        self.pipeline.synchronize()
        ranks = self.pipeline.ranks
        return super().evaluation_loop(
            CheckedLoader(dataloader, ranks) if ranks.size > 1 else dataloader, *args, **kwargs
        )


def _is_of_trainer(name: str, method: Any) -> bool:
    function = getattr(method, "__func__", None)
    return function is getattr(Trainer, name) and function.__module__.startswith("transformers.")


# Cut the batches of a Trainer into groups of rows, which do not depend on the number of processes.


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
