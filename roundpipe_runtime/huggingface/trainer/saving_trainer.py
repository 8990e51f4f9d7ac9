"""A Trainer that also saves the state of the pipeline, whole or in shards of several processes.

::

    optimizer.pt                       the optimizer of one process, or of a mesh without shards
    roundpipe.json, .safetensors       number of runs, for seeds; master weights; with shards or a disk, also the
                                       optimizer by name, written and read one tensor after the other
    shards/                            the rows of each of several processes, readable by any number of processes
"""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from yobx_flatten.files.document import read_document

from ...checkpoint.model_state import collect_progress, load_weights, optimizer_targets, restore_progress
from ...checkpoint.shards import cut_like, ranks_of
from ...checkpoint.training_state import check_optimizer, named_state, read_values, restore_optimizer, write_values
from ...device.disk import HOST_IN_MEMORY
from ...device.worker import generator_kept
from ...errors import CheckpointError, ConfigError, DamagedCheckpointError
from ...optim.disk_store import hold_on_disk
from ...pipeline import RoundPipe
from .pipeline_trainer import PipelineTrainer

# Name of the files that a plain Trainer does not write.
_PROGRESS = "roundpipe"


def _saves_by_name(pipeline: RoundPipe) -> bool:
    """Report whether the optimizer is saved by name, because it has shards, or may not fit into memory."""
    return pipeline.ranks.num_shards > 1 or pipeline.host != HOST_IN_MEMORY


def _load_progress(folder: pathlib.Path, pipeline: RoundPipe) -> None:
    """Load the state of a pipeline, which a checkpoint of a plain Trainer lacks."""
    if (folder / f"{_PROGRESS}.json").exists():
        restore_progress(pipeline, read_values(folder, _PROGRESS, targets=optimizer_targets(pipeline)))


def _save_shards(folder: pathlib.Path, pipeline: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    """Write the progress of a pipeline and its optimizer in shards; all processes must call it."""
    # folder: folder of the checkpoint; all processes write into the folder of the first process
    targets = optimizer_targets(pipeline)
    ranks = ranks_of(pipeline, targets)
    home = pathlib.Path(ranks.exchange(str(folder))[0])
    ranks.together(lambda: _check_shared(home))
    values = {**collect_progress(pipeline), "optimizers": [named_state(optimizer, targets)]}
    write_values(home, _PROGRESS, values, ranks=ranks)


def _has_shards(folder: pathlib.Path) -> bool:
    file = folder / f"{_PROGRESS}.json"
    return file.exists() and "optimizers" in read_document(file, dict[str, Any], failure=DamagedCheckpointError)


def _load_shards(folder: pathlib.Path, pipeline: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint of :func:`_save_shards`, which any number of processes may have written."""
    stored = read_values(folder, _PROGRESS, targets=optimizer_targets(pipeline))
    check_optimizer(optimizer, stored["optimizers"][0], optimizer_targets(pipeline))
    restore_progress(pipeline, stored)
    restore_optimizer(optimizer, stored["optimizers"][0], optimizer_targets(pipeline))


def _load_whole(file: pathlib.Path, optimizer: torch.optim.Optimizer) -> None:
    """Load this process's part of an optimizer that was saved as a whole."""
    stored = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    held: list[list[nn.Parameter]] = [group["params"] for group in optimizer.param_groups]
    numbers = [group["params"] for group in stored["param_groups"]]
    if [len(group) for group in numbers] != [len(group) for group in held]:
        raise CheckpointError(f"{file} is for a different optimizer: its groups have different numbers of parameters.")
    for number, target in ((n, t) for ns, ts in zip(numbers, held, strict=True) for n, t in zip(ns, ts, strict=True)):
        state: dict[str, Any] = stored["state"].get(number, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() == target.numel():
                state[key] = cut_like(value, target)
    optimizer.load_state_dict(stored)
    for target in (target for group in held for target in group):
        hold_on_disk(optimizer, target)


def _check_shared(folder: pathlib.Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder.parent.parent} is not the same folder on all machines. Train into a folder that all machines "
            "mount:\n    TrainingArguments(output_dir=...)"
        )


class SavingTrainer(PipelineTrainer):
    """A Trainer whose checkpoints also store the state of the pipeline, such as master weights."""

    _rp_is_converted = False

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self._rp_pipeline is not None:
            self._rp_pipeline.synchronize()
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = pathlib.Path(output_dir)
        if _saves_by_name(self.pipeline):
            _save_shards(folder, self.pipeline, self._rp_own_optimizer())
            if self.args.should_save and self.lr_scheduler is not None:
                torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
            return
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            write_values(folder, _PROGRESS, collect_progress(self.pipeline))

    def _rp_own_optimizer(self) -> torch.optim.Optimizer:
        found: Any = self.optimizer
        own: torch.optim.Optimizer = getattr(found, "optimizer", found)
        return own

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.pipeline.host != HOST_IN_MEMORY and load_weights(pathlib.Path(resume_from_checkpoint), self.model):
            return
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
        """Load weights whose names in the checkpoint differ from the names in the model, such as experts.

        The Trainer ignores these weights with a warning: https://github.com/huggingface/transformers/issues/43701
        """
        if self._rp_is_converted:
            with generator_kept():
                loaded, info = type(self.model).from_pretrained(
                    folder, config=self.model.config, dtype="auto", output_loading_info=True
                )
            if missing := sorted(info["missing_keys"]):
                model, first = type(self.model).__name__, missing[0]
                raise ConfigError(
                    f"{folder} is for a different model: it lacks {len(missing)} weights of {model}, like {first}."
                )
            self.model.load_state_dict(loaded.state_dict())
            self._rp_is_converted = False

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder, pipeline, optimizer = pathlib.Path(checkpoint), self.pipeline, self._rp_own_optimizer()
        if _has_shards(folder):
            _load_shards(folder, pipeline, optimizer)
        elif _saves_by_name(pipeline) and (folder / OPTIMIZER_NAME).is_file():
            _load_whole(folder / OPTIMIZER_NAME, optimizer)
            _load_progress(folder, pipeline)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
            _load_progress(folder, pipeline)
            return
        if (folder / SCHEDULER_NAME).is_file():
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))
