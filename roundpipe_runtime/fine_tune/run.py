"""Run a training to its last step or until it is stopped, with checkpoints, metrics and a timeline."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable

from ..timeline.record import Timeline
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
    checkpoints: str | os.PathLike[str],
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
        checkpoints: folder of the checkpoints.
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
    job = training.job
    recorded = None if timeline is None else min(training.step + _RECORDED_STEP, training.steps)
    saved, saved_at, first = None, training.step, training.step
    in_step, is_saved = True, False
    with Interruption(is_silent=job.size > 1) as interruption, contextlib.ExitStack() as stack:
        file: MetricsFile | None = None
        if metrics is not None:
            opened = functools.partial(MetricsFile, metrics, step=training.step)
            file = job.together(lambda: stack.enter_context(opened()) if job.is_first else None)

        def note(record: StepRecord | EvalRecord) -> None:
            if file is not None:
                file.write(record)
            show(record)

        try:
            while training.step < training.steps:
                if status := max(job.exchange(interruption.status)):  # a signal reaches processes in different steps
                    if saved_at != training.step or saved is None:
                        saved = training.save(checkpoints, keep=keep)
                    return Outcome(status, saved, recorded)
                drawn = Timeline() if training.step + 1 == recorded else None
                in_step = True
                for record in training.advance(drawn):
                    in_step = False
                    is_last = training.step == training.steps
                    if is_last and isinstance(record, StepRecord):
                        save_model()
                        is_saved = True
                    job.together(functools.partial(note, record))
                if drawn is not None and timeline is not None:
                    job.together(functools.partial(drawn.save, timeline_of_rank(timeline, job.rank)))
                if at_end if is_last else every is not None and training.step % every == 0:
                    saved, saved_at = training.save(checkpoints, keep=keep), training.step
            if not is_saved:  # the last step is of an earlier run
                save_model()
        except Exception as error:
            if is_saved:
                error.add_note("The trained model is saved.")
            # in a step of several processes, the others may be gone; one that began to write is neither done nor undone
            is_whole = not in_step or (job.size == 1 and not training.trainer.is_stepping)
            if training.step > first and is_whole:
                if saved_at < training.step:
                    saved = _saved_after(error, training, checkpoints, keep)
                if saved is not None:
                    error.add_note(f"The {training.step} steps before are saved in {saved}. To go on: --resume")
            raise
    return Outcome(0, saved, recorded)


def _saved_after(
    error: Exception, training: Training, checkpoints: str | os.PathLike[str], keep: int | None
) -> str | None:
    """The checkpoint after an error; a second error, as of the same full disk, only adds a note to the first."""
    try:
        return training.save(checkpoints, keep=keep)
    except Exception as second:
        error.add_note(f"The {training.step} steps before could not be saved: {second}")
        return None


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
