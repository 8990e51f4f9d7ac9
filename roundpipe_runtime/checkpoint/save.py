"""``save_checkpoint``: save a training at once, or in the background while it continues."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch import nn

from ..device.worker import Uninterrupted, Worker, free_after_fork, is_done, noting, on_error, wait_for
from ..errors import ConfigError
from . import folder as folders
from .model_state import check_writes_at_once, optimizer_targets
from .shards import CheckpointRanks, ranks_of
from .tensor_files import need_safetensors
from .training_state import TrainingObjects, TrainingState, collect_state, read_training

_LOG = logging.getLogger("roundpipe_runtime")
_AS_THEY_WERE = "The error occurred while {} was written. Earlier checkpoints are unchanged."
_WRITER = Worker("checkpoint")  # its thread starts with the first background save
_WRITING = free_after_fork(threading.Lock())
_PENDING: dict[pathlib.Path, Future[None]] = {}


class Checkpoint:
    """A saved checkpoint, whose files may still be written in the background.

    A ``Checkpoint`` can be passed as a path, as in ``from_pretrained(checkpoint)``.

    Attributes:
        path: folder of the checkpoint.

    >>> import os, tempfile
    >>> import torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint = save_checkpoint(folder, torch.nn.Linear(2, 1))
    ...     os.path.samefile(checkpoint, checkpoint.path)
    True
    """

    def __init__(self, path: pathlib.Path, writing: Future[None] | None = None) -> None:
        self.path = path
        self._writing = writing

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:  # transformers' normalized path
        return str(self.path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}{'' if self.done else ', being written'})"

    @property
    def done(self) -> bool:
        """Whether writing the checkpoint has ended, successfully or with an error."""
        return self._writing is None or is_done(self._writing)

    @property
    def data(self) -> dict[str, Any]:
        """The caller's ``data`` that was saved in the checkpoint."""
        self.wait()
        return dict(read_training(self.path, only=["data"])["data"])

    def wait(self) -> Checkpoint:
        """Wait until the checkpoint is written.

        Returns:
            The checkpoint itself.

        Raises:
            OSError: the checkpoint could not be written.
        """
        if self._writing is not None:
            _finish(self.path.parent, self._writing)
        return self


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    data: Mapping[str, Any] | None = None,
    keep: int | None = 3,
    is_async: bool = False,
    max_shard_bytes: int = 5 * 10**9,
) -> Checkpoint:
    """Save a checkpoint of a training: model, optimizer, random states and position in the data.

    The new checkpoint appears in the folder when all files of the checkpoint are written. The weights are stored under
    the names of the state dict, so that ``from_pretrained`` can load a Hugging Face model. A checkpoint contains
    weights, optimizer state, gradients, random generator states, and the number of pipeline calls.

    Args:
        folder: folder for the checkpoints of a single training.
        model: pipeline, module that holds pipelines, or any other module.
        optimizer: PyTorch optimizer of the model's parameters, or a list of optimizers.
        scheduler: learning rate scheduler, or a list of schedulers.
        scaler: gradient scaler.
        data: position in the training data: a dictionary of numbers, strings and tensors, of any nesting.
        keep: number of complete checkpoints to keep; older checkpoints are deleted. ``None`` keeps all.
        is_async: whether to copy the state in memory and write it in the background. If the background write fails,
            :meth:`Checkpoint.wait` or the next save into the folder raises the error.
        max_shard_bytes: largest size of a weight file in bytes; only a file with a single tensor may be larger.

    Returns:
        The checkpoint; with ``is_async``, its files may not be written yet.

    Raises:
        CheckpointError: a value cannot be stored, or another process is writing a checkpoint into the folder.
        ConfigError: an argument has an invalid value.
        OSError: the checkpoint could not be written; earlier checkpoints are unchanged.
        MissingDependencyError: safetensors is not installed.

    >>> import tempfile
    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint = save_checkpoint(folder, model, data={"epoch": 3})
    ...     (checkpoint.path / "model.safetensors").is_file()
    True
    """
    need_safetensors()
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ConfigError(f"save_checkpoint: keep must be a number of at least 1, or None for all, found {keep!r}.")
    if not isinstance(data, (dict, type(None))):
        raise ConfigError(f"save_checkpoint: data must be a dictionary, found {type(data).__qualname__}.")
    if is_async:
        check_writes_at_once(model)
    home = pathlib.Path(folder).absolute()
    finish_writing(home)
    ranks = ranks_of(model, optimizer_targets(model))
    objects = training_objects(optimizer, scheduler, scaler)
    state = ranks.together(lambda: collect_state(model, objects, data or {}, copy=is_async))
    with _WRITING:
        finish_writing(home)
        with contextlib.ExitStack() as held:
            with noting(_AS_THEY_WERE.format(home)):
                path = ranks.on_first(lambda: _begin(home, held))
            if not is_async:
                _write(state, path, keep, max_shard_bytes, ranks)
                return Checkpoint(path)
            with Uninterrupted():  # the next call waits for this one
                how = held.pop_all(), state, path, keep, max_shard_bytes, ranks
                writing = _PENDING[home] = _WRITER.submit(_write_logged, *how)
            return Checkpoint(path, writing)


def list_checkpoints(folder: str | os.PathLike[str]) -> list[Checkpoint]:
    """Return the checkpoints in a folder, the oldest first, without checking their files.

    Args:
        folder: folder that was passed to :func:`save_checkpoint`.

    Returns:
        The checkpoints.

    >>> import tempfile
    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = [save_checkpoint(folder, model, keep=2) for _ in range(3)]
    ...     len(list_checkpoints(folder))
    2
    """
    return [Checkpoint(path) for path in folders.checkpoints_in(pathlib.Path(folder).absolute())]


def finish_writing(folder: pathlib.Path) -> None:
    writing = _PENDING.get(folder)
    if writing is not None:
        _finish(folder, writing)


def training_objects(optimizer: Any, scheduler: Any, scaler: Any) -> TrainingObjects:
    # optimizer: optimizer, list of optimizers, or `None`
    # scheduler: scheduler, list of schedulers, or `None`
    return TrainingObjects(_as_list(optimizer), _as_list(scheduler), scaler)


def _as_list(value: Any) -> Sequence[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _begin(home: pathlib.Path, held: contextlib.ExitStack) -> pathlib.Path:
    held.enter_context(folders.only_writer(home))
    folders.remove_leftovers(home)
    return folders.next_path(home)


def _write(
    state: TrainingState, path: pathlib.Path, keep: int | None, shard_bytes: int, ranks: CheckpointRanks
) -> None:
    described: dict[str, object] = {}

    with noting(_AS_THEY_WERE.format(path)):
        with contextlib.ExitStack() as stack:
            half = folders.writing_path(path)
            ranks.on_first(
                lambda: stack.enter_context(
                    folders.appearing(path, seal=partial(folders.write_manifest, files=described))
                )
            )
            state.write(half, shard_bytes, ranks)
            own = ranks.together(lambda: folders.describe_files(half, ranks.rank, ranks.size))
            for files in ranks.exchange(own):
                described.update(files)
            ranks.on_first(stack.close)  # renames the folder
        ranks.on_first(lambda: folders.remove_old(path.parent, keep))


def _write_logged(held: contextlib.ExitStack, state: TrainingState, path: pathlib.Path, *rest: Any) -> None:
    # the process may end before the result is read
    with held, on_error(partial(_LOG.error, "%s was not written: %s", path)):
        _write(state, path, *rest)


def _finish(folder: pathlib.Path, writing: Future[None]) -> None:
    """Wait for a background save and raise its error, which later calls do not raise again."""
    try:
        wait_for(writing)
    finally:
        if is_done(writing) and _PENDING.get(folder) is writing:  # an interruption ends the wait, and not the writing
            _PENDING.pop(folder, None)
