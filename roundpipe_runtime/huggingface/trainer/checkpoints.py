"""Crash-safe checkpoints of the Trainer: they appear when they are complete, and a run resumes from the newest one.

::

    output_dir/checkpoint-6/                            complete: transformers' files and a manifest
    output_dir/.checkpoint-9.writing/checkpoint-9/      what the Trainer is writing to
    output_dir/.checkpoint-3.leaving/                   no more
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from transformers import Trainer

from yobx_flatten.files.document import read_document

from ...checkpoint.folder import (
    MANIFEST,
    appearing,
    is_complete,
    only_writer,
    remove_checkpoint,
    remove_leftovers,
    verify,
)
from ...errors import CheckpointError, CheckpointWarning, DamagedCheckpointError, warn

_NAME = re.compile(r"checkpoint-(\d+)")
_STATE = "trainer_state.json"  # what a Trainer writes last
_SENTINEL = "checkpoint-is-incomplete.txt"  # what it puts next to a checkpoint that a signal has asked for


class CheckpointingTrainer(Trainer):  # type: ignore[misc] # transformers counts as untyped
    """A ``transformers.Trainer`` whose checkpoints stay complete when the process is killed.

    The files are those of the Trainer. They are written under another name, flushed, and renamed, and
    ``resume_from_checkpoint=True`` resumes from the newest undamaged one.
    """

    _rp_writing_to: pathlib.Path | None = None

    def train(
        self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, *args: object, **kwargs: object
    ) -> object:
        """Train as a Trainer does; ``resume_from_checkpoint=True`` takes the newest undamaged checkpoint, or raises."""
        if resume_from_checkpoint is True:
            with self.args.main_process_first(local=False, desc="the newest checkpoint"):  # it removes leftovers
                found = newest_whole(pathlib.Path(self.args.output_dir))
            resume_from_checkpoint = found or True  # without any, the Trainer reports it
        elif resume_from_checkpoint and (pathlib.Path(resume_from_checkpoint) / MANIFEST).exists():
            _verify_given(pathlib.Path(resume_from_checkpoint))
        if isinstance(resume_from_checkpoint, os.PathLike):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _get_output_dir(self, trial: object) -> str:
        """The folder of checkpoints; while one is being written, the folder of that one."""
        return str(self._rp_writing_to or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: object, trial: object, *args: object, **kwargs: object) -> None:
        run = pathlib.Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        if not self.args.should_save:  # rank 0 writes; a separate folder takes what another rank would add
            with tempfile.TemporaryDirectory() as scratch, self._rp_into(pathlib.Path(scratch)):
                super()._save_checkpoint(model, trial, *args, **kwargs)
            self.accelerator.wait_for_everyone()
            self._rp_name_best(run, name)
            return
        outer = run / f".{name}.writing"
        with contextlib.ExitStack() as stack:
            stack.enter_context(only_writer(run))
            _settle(run)
            stack.callback(shutil.rmtree, outer, ignore_errors=True)
            half = stack.enter_context(appearing(run / name, outer / name))
            with self._rp_into(outer):
                super()._save_checkpoint(model, trial, *args, **kwargs)
            self._rp_name_best(run, name)
            self.state.save_to_json(str(half / _STATE))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run / name))
        remove_all_but(run, self.args.save_total_limit, self.state.best_model_checkpoint)
        self.accelerator.wait_for_everyone()

    @contextlib.contextmanager
    def _rp_into(self, folder: pathlib.Path) -> Iterator[None]:
        self._rp_writing_to = folder
        try:
            yield
        finally:
            self._rp_writing_to = None

    def _rp_name_best(self, run: pathlib.Path, name: str) -> None:
        """Set the final path of the best checkpoint, for which the Trainer looked where this one is being written."""
        best = f"checkpoint-{self.state.best_global_step}"
        if self.args.save_strategy != "no" and self.state.best_global_step and (best == name or (run / best).is_dir()):
            self.state.best_model_checkpoint = str(run / best)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._rp_writing_to is None:
            super()._push_from_checkpoint(checkpoint_folder)


def newest_whole(run: pathlib.Path) -> pathlib.Path | None:
    """Return the undamaged checkpoint with the most steps; ``None`` if there are no checkpoints.

    Each damaged one with more steps gets a warning. A checkpoint of a plain Trainer counts as undamaged if it has the
    file that is written last.
    """
    if run.is_dir():
        with contextlib.suppress(CheckpointError, OSError), only_writer(run):  # nor is there a half of one that writes
            _settle(run)
    there = sorted(_checkpoints(run), key=_steps, reverse=True)
    errors = []
    for path in there:
        try:
            _verify(path)
        except DamagedCheckpointError as error:
            errors.append(str(error))
            warn(f"A checkpoint is incomplete, so the previous one is tried. {error}", CheckpointWarning)
        else:
            return path
    if errors:
        raise DamagedCheckpointError("No checkpoint is complete:\n    " + "\n    ".join(errors))
    return None


def _settle(run: pathlib.Path) -> None:
    """Rename the checkpoints that a killed process had completed, and remove its unfinished ones."""
    for half in sorted(run.glob(".checkpoint-*.writing/checkpoint-*")):
        if is_complete(half) and not (run / half.name).exists():
            half.rename(run / half.name)
    remove_leftovers(run)


def remove_all_but(run: pathlib.Path, limit: int | None, best: str | None) -> None:
    """Remove checkpoints until ``limit`` are left. The newest stays, and so does the best one."""
    # limit: number of checkpoints to keep; `None` and 0 keep all
    # best: path of the best checkpoint, if it is known
    if not limit or limit < 0:
        return
    newest_first = sorted(_checkpoints(run), key=lambda path: (path.stat().st_mtime_ns, _steps(path)), reverse=True)
    whole = [path for path in newest_first if _is_whole(path)]
    kept = whole[:1] + [path for path in whole[1:] if best is not None and path == pathlib.Path(best)]
    kept += [path for path in whole if path not in kept][: max(0, limit - len(kept))]
    for path in newest_first:
        if path not in kept:
            remove_checkpoint(path)


def _checkpoints(run: pathlib.Path) -> list[pathlib.Path]:
    if not run.is_dir():
        return []
    return [path for path in run.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]


def _steps(path: pathlib.Path) -> int:
    return int(path.name.rpartition("-")[2])


def _verify(path: pathlib.Path) -> None:
    """Compare a checkpoint with its manifest; one of a plain Trainer has none."""
    if (path / MANIFEST).exists():
        verify(path)
    elif not _is_whole(path):
        raise DamagedCheckpointError(f"{path}: {_STATE}, which is written last, is missing or truncated.")


def _verify_given(path: pathlib.Path) -> None:
    try:
        verify(path)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(
            f"{error} Continue from the newest complete one:\n    trainer.train(resume_from_checkpoint=True)\nor "
            f"remove {MANIFEST} in it, if it was changed on purpose."
        ) from error


def _is_whole(path: pathlib.Path) -> bool:
    """Whether all files exist, without reading their contents."""
    if (path / MANIFEST).exists():
        return is_complete(path)
    try:
        read_document(path / _STATE, dict[str, Any], failure=DamagedCheckpointError, finite=False)
    except (OSError, DamagedCheckpointError):
        return False
    return not (path / _SENTINEL).exists()
