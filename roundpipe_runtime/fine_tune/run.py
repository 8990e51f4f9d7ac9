"""Run a training to its last step or until it is stopped, with checkpoints, metrics and a timeline."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator

from .interruption import Interruption
from .records import EvalRecord, MetricsFile, StepRecord
from .training import Training

__all__ = ["Outcome", "run", "timeline_of_rank"]

# The first steps are spent on finding out what a layer costs; the plan is settled after them.
_RECORDED_STEP = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a training: its exit status, checkpoint and timeline step.

    Attributes:
        status: exit status: 0 for a complete training, 130 after Ctrl-C, 143 after SIGTERM.
        checkpoint: last checkpoint that was written.
        recorded: step of the timeline; after an interruption this step may not have run.
    """

    status: int
    checkpoint: str | None
    recorded: int | None


def run(
    training: Training,
    *,
    checkpoints: str | os.PathLike[str] | None = None,
    every: int | None = None,
    keep: int | None = 3,
    at_end: bool = False,
    metrics: str | os.PathLike[str] | None = None,
    timeline: str | os.PathLike[str] | None = None,
    show: Callable[[StepRecord | EvalRecord], None] = lambda record: None,
    save_model: Callable[[], object] = lambda: None,
) -> Outcome:
    """Run all remaining steps of a training.

    An error does not take the steps before it with it: what was trained is saved in a checkpoint, which a note of the
    error names. There is none where the optimizer failed in the middle of its step.

    Of several processes the first one writes metrics, and each a timeline of its own.

    Ctrl-C and SIGTERM let the step end, with its evaluation; then a checkpoint is written, from which the training
    continues bitwise identically. A second signal ends the process at once.

    Args:
        training: training to run; after :meth:`Training.restore`, it continues.
        checkpoints: folder of the checkpoints; without one, none is written.
        every: steps between two checkpoints; ``None`` writes one only when the training is stopped.
        keep: number of checkpoints to keep; ``None`` keeps all.
        at_end: whether to write a checkpoint after the last step.
        metrics: file with a line of JSON per step and evaluation; after a restore it is continued.
        timeline: file for the timeline of one step; that of process 2 is ``step.2.json`` for ``step.json``.
        show: function that is called with each record, in each process.
        save_model: function that saves the trained model; it is called in each process after the last step, before the
            evaluation and everything else that may fail.

    Returns:
        How the training ended.

    Raises:
        FineTuneError: the training cannot continue.
        OSError: a file could not be written.
    """
    from .callbacks import RunCallback

    job, first = training.job, training.step
    if checkpoints is not None:
        training.save_into(checkpoints, keep=keep)
    with Interruption(is_silent=job.size > 1) as interruption, contextlib.ExitStack() as stack:
        note = stack.enter_context(_noting(training, metrics, show))
        callback = RunCallback(
            training,
            interruption,
            every=every if checkpoints is not None else None,
            at_end=at_end if checkpoints is not None else None,
            note=note,
            save_model=save_model,
            recorded=None if timeline is None else min(first + _RECORDED_STEP, training.steps),
            save_timeline=lambda drawn: drawn.save(timeline_of_rank(timeline or "", job.rank)),
        )
        training.trainer.add_callback(callback)
        stack.callback(training.trainer.remove_callback, callback)
        stack.enter_context(callback.recording)
        try:
            training.train()
            if not callback.status and not callback.is_model_saved:  # the last step is of an earlier run
                save_model()
        except Exception as error:
            if callback.is_model_saved:
                error.add_note("The trained model is saved.")
            if checkpoints is not None and training.step > first:
                _save_after(error, training, callback.saved)
            raise
    return Outcome(callback.status, callback.saved, callback.recorded)


@contextlib.contextmanager
def _noting(
    training: Training, path: str | os.PathLike[str] | None, show: Callable[[StepRecord | EvalRecord], None]
) -> Iterator[Callable[[StepRecord | EvalRecord], None]]:
    """A function that writes records into a file, in the first of several processes, and shows them."""
    if path is None:
        yield show
        return
    job, step = training.job, training.step
    file = job.together(lambda: MetricsFile(path, step=step) if job.is_first else None)
    if file is None:
        yield show
        return

    def note(record: StepRecord | EvalRecord) -> None:
        file.write(record)
        show(record)

    with file:
        yield note


def _save_after(error: Exception, training: Training, saved: str | None) -> None:
    """Save the steps before an error; a second error, as of the same full disk, only adds a note to the first."""
    trainer = training.trainer
    # in a step of several processes, the others may be gone; one that began to write is neither done nor undone
    is_whole = not trainer.in_step or (training.job.size == 1 and not trainer.is_stepping)
    if not is_whole:
        return
    try:
        if saved is None or not saved.endswith(f"checkpoint-{training.step}"):
            saved = trainer.save()
    except Exception as second:
        error.add_note(f"The {training.step} steps before could not be saved: {second}")
    else:
        error.add_note(f"The {training.step} steps before are saved in {saved}. To go on: --resume")


def timeline_of_rank(path: str | os.PathLike[str], rank: int) -> pathlib.Path:
    """Return the file for the timeline of a process.

    Args:
        path: file of the first process.
        rank: rank of the process.

    Returns:
        The path.

    >>> timeline_of_rank("runs/step.json", 2).as_posix()
    'runs/step.2.json'
    """
    first = pathlib.Path(path)
    return first.with_name(f"{first.stem}.{rank}{first.suffix}") if rank else first
