"""``load_checkpoint``: load the newest checkpoint that is not damaged."""

from __future__ import annotations

import contextlib
import copy
import os
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from yobx_flatten.files.document import damage_as

from ..device.worker import noting
from ..errors import CheckpointError, CheckpointWarning, DamagedCheckpointError, RoundPipeError, warn
from . import model_state, training_state
from .folder import checkpoints_in, is_checkpoint, verify
from .save import finish_writing, training_objects
from .shards import CheckpointRanks, ranks_of
from .tensor_files import need_safetensors, open_tensors


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
            failed to load the checkpoint; no object was changed.
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
    finish_writing(home)
    targets = model_state.optimizer_targets(model)
    ranks = ranks_of(model, targets)
    path: pathlib.Path | None = home
    if ranks.on_first(lambda: is_checkpoint(home)):
        # the manifest of a Trainer has the same format
        if not (home / training_state.TRAINING).exists() and (home / "trainer_state.json").exists():
            raise CheckpointError(
                f"{home} was written by a Trainer. Resume training with the Trainer:\n"
                f"    trainer.train(resume_from_checkpoint={str(home)!r})"
            )
        if (damage := _damage(home, ranks)) is not None:
            raise DamagedCheckpointError(damage)
    else:
        path = _newest(ranks.on_first(lambda: checkpoints_in(home)), ranks)
    return None if path is None else _restore(path, model, training_objects(optimizer, scheduler, scaler), ranks)


def _newest(there: list[pathlib.Path], ranks: CheckpointRanks) -> pathlib.Path | None:
    """Return the newest undamaged checkpoint, or ``None`` without checkpoints; raise an error if all are damaged."""
    errors = []
    # All processes choose the same checkpoint: each checks a part of the files, and the damage is shared.
    for path in reversed(there):
        damage = _damage(path, ranks)
        if damage is None:
            return path
        errors.append(damage)
        if ranks.rank == 0:
            warn(f"A checkpoint is damaged, so the previous one is tried. {damage}", CheckpointWarning)
    if errors:
        raise DamagedCheckpointError("All checkpoints are damaged:\n    " + "\n    ".join(errors))
    return None


def _damage(path: pathlib.Path, ranks: CheckpointRanks) -> str | None:
    """Verify the files of a checkpoint, some in each process; return the first error of all processes, or ``None``."""

    def check() -> str | None:
        try:
            verify(path, ranks.rank, ranks.size)
        except DamagedCheckpointError as error:
            return str(error)
        return None

    return next((found for found in ranks.exchange(ranks.together(check)) if found is not None), None)


def _restore(
    path: pathlib.Path, model: nn.Module, parts: training_state.TrainingObjects, ranks: CheckpointRanks
) -> dict[str, Any]:
    """Restore optimizers and model from a checkpoint and return its ``data``; undo all if an optimizer fails."""
    with contextlib.ExitStack() as stack:
        undo = stack.enter_context(contextlib.ExitStack())
        # 1. All that can fail is read and checked while nothing has changed yet.
        stored, tensors = ranks.together(lambda: _read(path, model, parts, stack))
        # 2. `load_state_dict` of an optimizer or scheduler is foreign code: if it fails, all processes undo it.
        ranks.together(lambda: _restore_parts(path, stored, model, parts, undo))
        # 3. From here on only tensors are copied whose names and shapes were checked.
        undo.pop_all()
        with noting("The checkpoint may be partly loaded. Restart the program and load the checkpoint again."):
            ranks.together(lambda: _restore_model(stored, tensors, model))
    # Last, since the other restores may draw random numbers.
    training_state.restore_random_state(stored["random"])
    data: dict[str, Any] = stored["data"]
    return data


def _read(
    path: pathlib.Path, model: nn.Module, parts: training_state.TrainingObjects, stack: contextlib.ExitStack
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    targets = model_state.optimizer_targets(model)
    with damage_as(DamagedCheckpointError, str(path), RoundPipeError):
        stored = training_state.read_training(path, targets=targets)
        if not isinstance(stored["data"], dict):
            raise TypeError("data= of the checkpoint is not a dictionary")
        for states in (stored["optimizers"], stored["schedulers"]):
            if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
                raise TypeError("the states of optimizers or schedulers are not a list of dictionaries")
        training_state.check_random_state(stored["random"])
        files = stack.enter_context(open_tensors(path, "model"))
        tensors = training_state.read_weights(path, files, dict(model.named_parameters()))
        model_state.check_model(model, stored["model"], tensors, goes_on=bool(parts.optimizers))
        model_state.check_progress(model, stored["progress"])
        _check_parts(stored, parts)
        if parts.optimizers:
            model_state.check_masters(model, stored["progress"])
        for optimizer, state in zip(parts.optimizers, stored["optimizers"], strict=False):
            training_state.check_optimizer(optimizer, state, targets)
    return stored, tensors


def _restore_parts(
    path: pathlib.Path,
    stored: dict[str, Any],
    model: nn.Module,
    parts: training_state.TrainingObjects,
    undo: contextlib.ExitStack,
) -> None:
    targets = model_state.optimizer_targets(model)
    for optimizer, state in zip(parts.optimizers, stored["optimizers"], strict=False):
        undo.callback(_undo_of(optimizer))
        with damage_as(DamagedCheckpointError, str(path), RoundPipeError):
            training_state.restore_optimizer(optimizer, state, targets)
    for scheduler, state in zip(parts.schedulers, stored["schedulers"], strict=False):
        undo.callback(_undo_of(scheduler))
        scheduler.load_state_dict(state)
    if parts.scaler is not None:
        undo.callback(_undo_of(parts.scaler))
        parts.scaler.load_state_dict(stored["scaler"])


def _restore_model(stored: dict[str, Any], tensors: dict[str, torch.Tensor], model: nn.Module) -> None:
    model_state.restore_parameters(model, stored["model"], tensors)
    model_state.restore_progress(model, stored["progress"])


def _check_parts(stored: dict[str, Any], parts: training_state.TrainingObjects) -> None:
    """Raise an error if another number of optimizers or schedulers was saved; warn of saved objects not loaded."""
    scalers = [stored["scaler"]] if stored["scaler"] is not None else []
    kinds = [
        ("optimizer", parts.optimizers, stored["optimizers"]),
        ("scheduler", parts.schedulers, stored["schedulers"]),
        ("scaler", [parts.scaler] if parts.scaler is not None else [], scalers),
    ]
    for kind, given, there in kinds:
        if given and len(given) != len(there):
            raise CheckpointError(f"load_checkpoint: {kind}= has {len(given)} entries, but {len(there)} were saved.")
    left = [kind for kind, given, there in kinds if there and not given]
    if left and any(given for _, given, _ in kinds):
        warn(
            f"load_checkpoint: the checkpoint also contains {', '.join(left)}, which is not loaded.",
            CheckpointWarning,
        )


def _undo_of(part: Any) -> Callable[[], None]:
    """Return a function that restores the current state of an optimizer, scheduler or scaler."""
    # part: object with `state_dict` and `load_state_dict`
    if hasattr(part, "param_groups") and hasattr(part, "state"):
        state, groups = part.state, part.param_groups  # not copied: a load replaces the tensors

        def put_back() -> None:
            part.__setstate__({"state": state, "param_groups": groups})

        return put_back
    before = copy.deepcopy(part.state_dict())

    def load_back() -> None:
        with contextlib.suppress(Exception):  # `load_state_dict` may be the call that failed
            part.load_state_dict(before)

    return load_back
