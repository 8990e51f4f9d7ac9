"""The state of a training at one moment: collected, written to the files of a checkpoint, and read back.

::

    model.safetensors       parameters and buffers, by the model's own names      config.json, for transformers
    training.safetensors    tensors of the rest: moments, master weights, gradients, generators
    training.json           the rest: hyperparameters, counters, the place in the data
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .codec import decode, encode
from .config_files import config_files
from .model_state import collect_parameters, collect_progress, optimizer_targets
from .optimizer_state import named_state
from .rng import random_state
from .tensor_files import open_tensors, write_tensors

__all__ = [
    "TRAINING",
    "TrainingObjects",
    "TrainingState",
    "collect_state",
    "read_training",
    "read_values",
    "write_values",
]

TRAINING = "training.json"


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingObjects:
    """The parts of a training that are stored in addition to the model.

    Attributes:
        optimizers: optimizers of the model.
        schedulers: objects with ``state_dict`` and ``load_state_dict``.
        scaler: object with the same methods, at most one.
    """

    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    scaler: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingState:
    """The state of a training, which later steps do not change unless it was collected without copies.

    Attributes:
        texts: contents of text files, by name.
        model: tensors of the model, by name.
        training: tensors of everything else.
    """

    texts: Mapping[str, str]
    model: Mapping[str, torch.Tensor]
    training: Mapping[str, torch.Tensor]

    def write(self, folder: pathlib.Path, shard_bytes: int) -> None:
        """Write the files of a checkpoint.

        Args:
            folder: folder to write to.
            shard_bytes: largest number of bytes of a file, unless one tensor is larger.

        Raises:
            OSError: a file could not be written.
        """
        for name, text in self.texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        write_tensors(folder, "model", self.model, shard_bytes)
        write_tensors(folder, "training", self.training, shard_bytes)
        for path in folder.glob("*.safetensors"):
            shutil.copymode(folder / TRAINING, path)  # safetensors writes files that other users may not read


def collect_state(model: nn.Module, parts: TrainingObjects, data: Mapping[str, Any], *, copy: bool) -> TrainingState:
    """Collect the state of a training.

    Args:
        model: pipeline, module that holds pipelines, or any other module.
        parts: the other parts of the training.
        data: place in the data.
        copy: whether training may go on before the state is written.

    Returns:
        The state.
    """
    weights: dict[str, torch.Tensor] = {}
    state = {
        "model": collect_parameters(model, weights),
        "progress": collect_progress(model),
        "optimizers": [named_state(optimizer, optimizer_targets(model)) for optimizer in parts.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in parts.schedulers],
        "scaler": None if parts.scaler is None else parts.scaler.state_dict(),
        "data": dict(data),
        "random": random_state(),
    }
    rest: dict[str, torch.Tensor] = {}
    encoded = {key: encode(value, key, rest) for key, value in state.items()}
    texts = {TRAINING: json.dumps(encoded, allow_nan=False), **config_files(model)}
    return TrainingState(texts, _on_host(weights, copy=copy), _on_host(rest, copy=copy))


def read_training(folder: pathlib.Path, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Read what :func:`collect_state` collected, except for the tensors of the model; all of it, or some keys.

    Args:
        folder: folder of the checkpoint.
        only: keys to read. Default: all.

    Returns:
        The values by key.
    """
    return read_values(folder, "training", only)


def write_values(folder: pathlib.Path, stem: str, values: Mapping[str, Any], shard_bytes: int = 5 * 10**9) -> None:
    """Write nested values to ``{stem}.json`` and their tensors to ``{stem}.safetensors``.

    Args:
        folder: folder to write to.
        stem: start of the file names.
        values: nested values by key, as :func:`encode` takes them.
        shard_bytes: largest number of bytes of a file, unless one tensor is larger. Default: 5 GB.

    Raises:
        CheckpointError: a value cannot be stored.
        OSError: a file could not be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    encoded = {key: encode(value, key, tensors) for key, value in values.items()}
    (folder / f"{stem}.json").write_text(json.dumps(encoded, allow_nan=False), encoding="utf-8")
    write_tensors(folder, stem, _on_host(tensors, copy=False), shard_bytes)


def read_values(folder: pathlib.Path, stem: str, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Read what :func:`write_values` wrote, all of it or some keys.

    Args:
        folder: folder to read from.
        stem: start of the file names.
        only: keys to read. Default: all.

    Returns:
        The values by key.
    """
    stored = json.loads((folder / f"{stem}.json").read_text(encoding="utf-8"))
    with open_tensors(folder, stem) as tensors:
        return {key: decode(stored[key], tensors) for key in (stored if only is None else only)}


def _on_host(tensors: Mapping[str, torch.Tensor], *, copy: bool) -> dict[str, torch.Tensor]:
    """Tensors on the host, each with memory of its own, as files need them."""
    found, seen = {}, set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        is_own = plain.untyped_storage().data_ptr() != memory
        if not is_own and (copy or memory in seen or plain.untyped_storage().nbytes() != plain.nbytes):
            plain = plain.clone()
        seen.add(memory)
        found[name] = plain
    return found
