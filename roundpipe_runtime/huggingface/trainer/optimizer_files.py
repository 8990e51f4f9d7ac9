"""The optimizer of a Trainer in its checkpoints: whole, in the Trainer's file, or in shards of several processes.

::

    optimizer.pt                       one process, or a mesh that keeps everything whole
    roundpipe.json, .safetensors       runs that seeds count; master weights; of shards: all of the optimizer by name
    shards/                            several processes: the rows that each has; read by any number of them
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch
from torch import nn

from ...checkpoint.errors import CheckpointError
from ...checkpoint.model_state import collect_progress, optimizer_targets, restore_progress
from ...checkpoint.optimizer_state import check_optimizer, named_state, restore_optimizer
from ...checkpoint.ranks import ranks_of
from ...checkpoint.shards import cut_like
from ...checkpoint.training_state import read_values, write_values
from ...pipeline import RoundPipe

__all__ = ["has_shards", "is_sharded", "load_progress", "load_shards", "load_whole", "save_progress", "save_shards"]

# Next to the files of the Trainer.
_PROGRESS = "roundpipe"


def is_sharded(pipeline: RoundPipe) -> bool:
    """Report whether each process has a part of what the optimizer works on."""
    return pipeline.ranks.num_shards > 1


def save_progress(folder: pathlib.Path, pipeline: RoundPipe) -> None:
    """Write what of a pipeline the Trainer does not write."""
    write_values(folder, _PROGRESS, collect_progress(pipeline))


def load_progress(folder: pathlib.Path, pipeline: RoundPipe) -> None:
    """Load what :func:`save_progress` wrote; a plain Trainer has not written it."""
    if (folder / f"{_PROGRESS}.json").is_file():
        restore_progress(pipeline, read_values(folder, _PROGRESS, targets=optimizer_targets(pipeline)))


def save_shards(folder: pathlib.Path, pipeline: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    """Write the progress of a pipeline and its optimizer, each process its part; all of them call it."""
    # folder: folder of the checkpoint in the first process, which is the one that is written to
    targets = optimizer_targets(pipeline)
    ranks = ranks_of(pipeline, targets)
    home = pathlib.Path(ranks.exchange(str(folder))[0])
    ranks.together(lambda: _check_shared(home))
    values = {**collect_progress(pipeline), "optimizers": [named_state(optimizer, targets)]}
    write_values(home, _PROGRESS, values, ranks=ranks)


def has_shards(folder: pathlib.Path) -> bool:
    """Report whether :func:`save_shards` has written a checkpoint."""
    file = folder / f"{_PROGRESS}.json"
    return file.is_file() and "optimizers" in json.loads(file.read_text(encoding="utf-8"))


def load_shards(folder: pathlib.Path, pipeline: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    """Load what :func:`save_shards` wrote, in any number of processes."""
    stored = read_values(folder, _PROGRESS, targets=optimizer_targets(pipeline))
    check_optimizer(optimizer, stored["optimizers"][0], optimizer_targets(pipeline))
    restore_progress(pipeline, stored)
    restore_optimizer(optimizer, stored["optimizers"][0], optimizer_targets(pipeline))


def load_whole(file: pathlib.Path, pipeline: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    """Load the part of this process of an optimizer that was saved whole."""
    stored = torch.load(file, map_location="cpu", weights_only=True)
    held: list[list[nn.Parameter]] = [group["params"] for group in optimizer.param_groups]
    numbers = [group["params"] for group in stored["param_groups"]]
    if [len(group) for group in numbers] != [len(group) for group in held]:
        raise CheckpointError(f"{file} is of another optimizer: its groups have other numbers of parameters.")
    for number, target in ((n, t) for ns, ts in zip(numbers, held, strict=True) for n, t in zip(ns, ts, strict=True)):
        state: dict[str, Any] = stored["state"].get(number, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() == target.numel():
                state[key] = cut_like(value, target)
    optimizer.load_state_dict(stored)


def _check_shared(folder: pathlib.Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder.parent.parent} is not the same folder on all machines. Train into a folder that all of them "
            "mount:\n    TrainingArguments(output_dir=...)"
        )
