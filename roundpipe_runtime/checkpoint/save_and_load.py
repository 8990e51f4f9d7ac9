"""Save a checkpoint, in the caller's thread or in the background, and load a checkpoint."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import nn

from yobx_flatten.core.files.document import damage_as
from yobx_flatten.errors.failures import result_or

from ..device.disk import HOST_IN_MEMORY
from ..device.worker import Uninterrupted, Worker, free_after_fork, is_done, noting, on_error, wait_for
from ..errors import CheckpointError, CheckpointWarning, ConfigError, DamagedCheckpointError, RoundPipeError, warn
from . import folder as folders
from . import model_state, training_state
from .shards import CheckpointRanks, ranks_of
from .tensor_files import need_safetensors, open_tensors

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
        self.path, self._writing = path, writing

    def __fspath__(self) -> str:
        return str(self.path)

    __str__ = __fspath__  # transformers' normalized path

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
        return dict(training_state.read_values(self.path, training_state.STEM, ["data"])["data"])

    def wait(self) -> Checkpoint:
        """Wait until the checkpoint is written.

        Returns:
            The checkpoint itself.

        Raises:
            OSError: the checkpoint could not be written.
        """
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
        data: dictionary of numbers, strings and tensors, of any nesting, such as the position in the training data.
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
        raise ConfigError(f"save_checkpoint: keep must be a whole number of at least 1, or None, found {keep!r}.")
    if not isinstance(data, (dict, type(None))):
        raise ConfigError(f"save_checkpoint: data must be a dictionary, found {type(data).__qualname__}.")
    for _, pipeline in model_state.pipelines_of(model) if is_async else ():
        if pipeline.host != HOST_IN_MEMORY:
            raise ConfigError(
                f"save_checkpoint(is_async=True) copies the training state into memory, but {pipeline.name} has "
                f'host="{pipeline.host}", so the copy may not fit. Save synchronously:\n'
                "    save_checkpoint(folder, model, optimizer=optimizer, is_async=False)"
            )
    home = pathlib.Path(folder).absolute()
    _finish(home, _PENDING.get(home))
    ranks = ranks_of(model, model_state.optimizer_targets(model))
    objects = training_state.TrainingObjects(_as_list(optimizer), _as_list(scheduler), scaler)
    state = ranks.together(lambda: training_state.collect_state(model, objects, data or {}, copy=is_async))
    with _WRITING:
        _finish(home, _PENDING.get(home))
        with contextlib.ExitStack() as held:

            def begin() -> pathlib.Path:
                held.enter_context(folders.only_writer(home))
                folders.remove_leftovers(home)
                return folders.next_path(home)

            with noting(_AS_THEY_WERE.format(home)):
                path = ranks.on_first(begin)

            def write() -> None:
                described: dict[str, object] = {}
                with noting(_AS_THEY_WERE.format(path)):
                    with contextlib.ExitStack() as stack:
                        half = folders.writing_path(path)
                        new = folders.appearing(path, seal=partial(folders.write_manifest, files=described))
                        ranks.on_first(lambda: stack.enter_context(new))
                        state.write(half, max_shard_bytes, ranks)
                        own = ranks.together(lambda: folders.describe_files(half, ranks.rank, ranks.size))
                        for files in ranks.exchange(own):
                            described.update(files)
                        ranks.on_first(stack.close)  # renames the folder
                    ranks.on_first(lambda: folders.remove_old(path.parent, keep))

            if not is_async:
                write()
                return Checkpoint(path)

            def write_logged(until: contextlib.ExitStack) -> None:
                # the process may end before the result is read
                with until, on_error(partial(_LOG.error, "%s was not written: %s", path)):
                    write()

            with Uninterrupted():  # the next call waits for this one
                writing = _PENDING[home] = _WRITER.submit(write_logged, held.pop_all())
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


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _finish(folder: pathlib.Path, writing: Future[None] | None) -> None:
    """Wait for a background save, and raise the error of the save if it failed."""
    if writing is None:
        return
    try:
        wait_for(writing)
    finally:
        if is_done(writing) and _PENDING.get(folder) is writing:  # an interruption ends the wait, and not the writing
            _PENDING.pop(folder, None)


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
) -> dict[str, Any] | None:
    """Load the newest undamaged checkpoint into a training, and return its ``data``.

    Before loading, every file of the checkpoint is compared with its checksum. A damaged checkpoint is skipped with a
    warning, and the previous checkpoint is loaded. The number of devices, the number of microbatches and the execution
    plan may differ from those of the saved training.

    Args:
        folder: folder that was passed to :func:`save_checkpoint`, or a single checkpoint in the folder.
        model: model whose parameters have the names and shapes of the saved parameters.
        optimizer: optimizer with the class and parameter groups of the saved optimizer, or a list of optimizers.
        scheduler: learning rate scheduler, or a list of schedulers.
        scaler: gradient scaler.

    Returns:
        The ``data`` that was passed to :func:`save_checkpoint`; ``None`` if the folder has no checkpoint.

    Raises:
        CheckpointError: the checkpoint does not match the model, optimizer, scheduler or scaler, or another process
            failed to load the checkpoint. The arguments are unchanged, unless a note on the error reports otherwise.
        DamagedCheckpointError: the folder has checkpoints, but all are damaged.
        MissingDependencyError: safetensors is not installed.

    >>> import tempfile
    >>> import torch
    >>> from roundpipe_runtime import save_checkpoint
    >>> model, resumed = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint = save_checkpoint(folder, model, data={"epoch": 3})
    ...     load_checkpoint(folder, resumed)
    {'epoch': 3}
    >>> torch.equal(resumed.weight, model.weight)
    True
    """
    need_safetensors()
    home = pathlib.Path(folder).absolute()
    _finish(home, _PENDING.get(home))
    targets = model_state.optimizer_targets(model)
    ranks = ranks_of(model, targets)
    path: pathlib.Path | None = home
    if ranks.on_first(lambda: folders.is_checkpoint(home)):
        # the manifest of a Trainer has the same format
        if not (home / f"{training_state.STEM}.json").exists() and (home / "trainer_state.json").exists():
            raise CheckpointError(
                f"{home} was written by a Trainer. Resume training with the Trainer:\n"
                f"    trainer.train(resume_from_checkpoint={str(home)!r})"
            )
        if (damage := _damage(home, ranks)) is not None:
            raise DamagedCheckpointError(damage)
    else:
        errors, path = list[str](), None
        # All processes choose the same checkpoint: each checks a part of the files, and the damage is shared.
        for found in reversed(ranks.on_first(lambda: folders.checkpoints_in(home))):
            if (damage := _damage(found, ranks)) is None:
                path = found
                break
            errors.append(damage)
            if ranks.rank == 0:
                warn(f"A checkpoint is damaged, so the previous one is tried. {damage}", CheckpointWarning)
        if path is None and errors:
            raise DamagedCheckpointError("All checkpoints are damaged:\n    " + "\n    ".join(errors))
    if path is None:
        return None
    objects = training_state.TrainingObjects(_as_list(optimizer), _as_list(scheduler), scaler)
    return _restore(path, model, objects, ranks)


def _damage(path: pathlib.Path, ranks: CheckpointRanks) -> str | None:
    """Verify the files of a checkpoint, and return the first error that a process found, or ``None``."""

    def check() -> str | None:
        try:
            folders.verify(path, ranks.rank, ranks.size)
        except DamagedCheckpointError as error:
            return str(error)
        return None

    return next((found for found in ranks.exchange(ranks.together(check)) if found is not None), None)


def _restore(
    path: pathlib.Path, model: nn.Module, parts: training_state.TrainingObjects, ranks: CheckpointRanks
) -> dict[str, Any]:
    """Load a checkpoint into a model and its optimizers, and return the ``data`` that was saved with it."""
    with contextlib.ExitStack() as stack:
        undo = stack.enter_context(contextlib.ExitStack())
        # 1. All that can fail is read and checked while nothing has changed yet.
        stored, tensors = ranks.together(lambda: _read(path, model, parts, stack))

        # 2. `load_state_dict` of an optimizer or scheduler is foreign code: if it fails, all processes undo it.
        def restore_parts() -> None:
            targets = model_state.optimizer_targets(model)
            for optimizer, state in zip(parts.optimizers, stored["optimizers"], strict=False):
                undo.callback(_undo_of(optimizer))
                with damage_as(DamagedCheckpointError, str(path), RoundPipeError):
                    training_state.restore_optimizer(optimizer, state, targets)
            others = [*zip(parts.schedulers, stored["schedulers"], strict=False)]
            for part, state in [*others, *([] if parts.scaler is None else [(parts.scaler, stored["scaler"])])]:
                undo.callback(_undo_of(part))
                part.load_state_dict(state)

        # 3. Then only tensors are copied whose names and shapes were checked.
        def restore_model() -> None:
            model_state.restore_parameters(model, stored["model"], tensors)
            model_state.restore_progress(model, stored["progress"])

        ranks.together(restore_parts)
        undo.pop_all()
        with noting("The checkpoint may be partly loaded. Restart the program and load the checkpoint again."):
            ranks.together(restore_model)
    # Last, since the other restores may draw random numbers.
    training_state.restore_random_state(stored["random"])
    data: dict[str, Any] = stored["data"]
    return data


def _read(
    path: pathlib.Path, model: nn.Module, parts: training_state.TrainingObjects, stack: contextlib.ExitStack
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    targets = model_state.optimizer_targets(model)
    with damage_as(DamagedCheckpointError, str(path), RoundPipeError):
        stored = training_state.read_values(path, training_state.STEM, targets=targets)
        if not isinstance(stored["data"], dict):
            raise TypeError("the stored data= is not a dictionary")
        for states in (stored["optimizers"], stored["schedulers"]):
            if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
                raise TypeError("the states of optimizers or schedulers are not a list of dictionaries")
        training_state.check_random_state(stored["random"])
        files = stack.enter_context(open_tensors(path, "model"))
        tensors = training_state.read_weights(path, files, dict(model.named_parameters()))
        model_state.check_model(model, stored["model"], tensors, goes_on=bool(parts.optimizers))
        model_state.check_progress(model, stored["progress"])
        # the state of a scaler may be a list
        scalers = [[] if one is None else [one] for one in (parts.scaler, stored["scaler"])]
        kinds: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
            "optimizer": (parts.optimizers, stored["optimizers"]),
            "scheduler": (parts.schedulers, stored["schedulers"]),
            "scaler": (scalers[0], scalers[1]),
        }
        for kind, (given, there) in kinds.items():
            if given and len(given) != len(there):
                counts = f"{len(given)} entries, but {len(there)} were saved"
                raise CheckpointError(f"load_checkpoint: {kind}= has {counts}.")
        left = [kind for kind, (given, there) in kinds.items() if there and not given]
        if left and any(given for given, _ in kinds.values()):
            also = f"load_checkpoint: the checkpoint also contains {', '.join(left)}, which is not loaded."
            warn(also, CheckpointWarning)
        if parts.optimizers:
            model_state.check_masters(model, stored["progress"])
        for optimizer, state in zip(parts.optimizers, stored["optimizers"], strict=False):
            training_state.check_optimizer(optimizer, state, targets)
    return stored, tensors


def _undo_of(part: Any) -> Callable[[], None]:
    # part: object with `state_dict` and `load_state_dict`
    if hasattr(part, "param_groups") and hasattr(part, "state"):
        # not copied: a load replaces the tensors
        held = {"state": part.state, "param_groups": part.param_groups}
        return lambda: part.__setstate__(held)  # a wrapper of an optimizer may lack the method
    before = copy.deepcopy(part.state_dict())
    # `load_state_dict` may be the call that failed
    return lambda: result_or(lambda: part.load_state_dict(before), lambda error: None)
