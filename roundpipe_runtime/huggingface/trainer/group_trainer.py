"""A Trainer that reads its data in groups of rows, so that a batch is that of all processes."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

from .group_batches import CheckedLoader, has_rows, loader_of_groups, take_together
from .pipeline_trainer import PipelineTrainer

__all__ = ["GroupTrainer"]


class GroupTrainer(PipelineTrainer):
    """A Trainer whose batches are those of all processes."""

    def get_train_dataloader(self) -> Any:
        """Return the loader of this process's rows; in groups, of which a batch of all processes is made."""
        if not self._rp_has_groups():
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
