"""A Trainer that saves what a pipeline has in addition to its model: optimizer copies, runs and shards."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ...errors import ConfigError
from .optimizer_files import (
    has_shards,
    is_sharded,
    load_progress,
    load_shards,
    load_whole,
    save_progress,
    save_shards,
)
from .pipeline_trainer import PipelineTrainer

__all__ = ["SavingTrainer"]


class SavingTrainer(PipelineTrainer):
    """A Trainer whose checkpoints hold all of a pipeline."""

    _rp_is_converted = False

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self._rp_pipeline is not None:
            self._rp_pipeline.synchronize()
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = pathlib.Path(output_dir)
        if is_sharded(self.pipeline):
            save_shards(folder, self.pipeline, self._rp_own_optimizer())
            if self.args.should_save and self.lr_scheduler is not None:
                torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
            return
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            save_progress(folder, self.pipeline)

    def _rp_own_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without what accelerate puts around it."""
        found: Any = self.optimizer
        own: torch.optim.Optimizer = getattr(found, "optimizer", found)
        return own

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._rp_load_converted(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._rp_load_converted(self.state.best_model_checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        has_others = bool(load_result.missing_keys and load_result.unexpected_keys)
        self._rp_is_converted = has_others and isinstance(self.model, PreTrainedModel)
        if not self._rp_is_converted:
            super()._issue_warnings_after_load(load_result)

    def _rp_load_converted(self, folder: str) -> None:
        """Load weights that are saved under other names than the model has in memory, as experts of mixtures are.

        The Trainer warns, and trains on without these weights: https://github.com/huggingface/transformers/issues/43701
        """
        if self._rp_is_converted:
            with torch.random.fork_rng(devices=()):
                loaded, info = type(self.model).from_pretrained(
                    folder, config=self.model.config, dtype="auto", output_loading_info=True
                )
            if missing := sorted(info["missing_keys"]):
                raise ConfigError(
                    f"{folder} is of another model: it lacks {len(missing)} weights of {type(self.model).__name__}, "
                    f"like {missing[0]}."
                )
            self.model.load_state_dict(loaded.state_dict())
            self._rp_is_converted = False

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder, pipeline, optimizer = pathlib.Path(checkpoint), self.pipeline, self._rp_own_optimizer()
        if has_shards(folder):
            load_shards(folder, pipeline, optimizer)
        elif is_sharded(pipeline) and (folder / OPTIMIZER_NAME).is_file():
            load_whole(folder / OPTIMIZER_NAME, pipeline, optimizer)
            load_progress(folder, pipeline)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
            load_progress(folder, pipeline)
            return
        if (folder / SCHEDULER_NAME).is_file():
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))
