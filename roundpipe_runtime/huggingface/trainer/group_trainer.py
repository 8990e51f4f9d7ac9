"""A Trainer that reads its data in groups of rows, so that a batch is that of all processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from ...distributed.ranks.errors import format_failure, raise_first
from ...errors import ConfigError
from .group_batches import CheckedLoader, has_rows, loader_of_groups, take_together
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
