"""Run a training to its last step or until it is stopped, with checkpoints, metrics and a timeline."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from yobx_flatten.errors.failures import result_or

from ..device.worker import on_error
from .job import Interruption
from .records import EvalRecord, MetricsFile, StepRecord
from .training import Training

if TYPE_CHECKING:  # the import of transformers takes seconds
    from .trainer import RunCallback

# The first steps measure the cost of each layer; then the plan is fixed.
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
    show_evaluation: Callable[[int, int], None] = lambda done, total: None,
    save_model: Callable[[], object] = lambda: None,
) -> Outcome:
    """Run all remaining steps of a training.

    After an error, the steps before it are saved in a checkpoint, which a note of the error names, unless the optimizer
    failed in the middle of its step. Ctrl-C and SIGTERM finish the step, with its evaluation, and write a checkpoint,
    from which the training continues bitwise identically; a second signal ends the process at once. Of several
    processes, the first process writes metrics, and each process writes its own timeline.

    Args:
        training: training to run; after :meth:`Training.restore`, it continues.
        checkpoints: folder of the checkpoints; without a folder, none is written.
        every: steps between two checkpoints; ``None`` writes one only when the training is stopped.
        keep: number of checkpoints to keep; ``None`` keeps all.
        at_end: whether to write a checkpoint after the last step.
        metrics: file with a line of JSON per step and evaluation; after a restore, lines are appended.
        timeline: file for the timeline of one step. With ``step.json``, process 2 writes ``step.2.json``.
        show: function that is called with each record, in each process.
        show_evaluation: function that is called after each batch of an evaluation, with the batch number and count.
        save_model: function that saves the model, called in each process right after the last step.

    Returns:
        How the training ended.

    Raises:
        FineTuneError: the training cannot continue.
        OSError: a file could not be written.
    """
    from .trainer import RunCallback

    if checkpoints is not None:
        training.save_into(checkpoints, keep=keep)
    with Interruption(is_silent=training.job.size > 1) as interruption, contextlib.ExitStack() as stack:
        callback = RunCallback(
            training.trainer,
            interruption,
            every=every if checkpoints is not None else None,
            at_end=at_end if checkpoints is not None else None,
            note=stack.enter_context(_noting(training, metrics, show)),
            show_evaluation=show_evaluation,
            save_model=save_model,
            recorded=None if timeline is None else min(training.step + _RECORDED_STEP, training.steps),
            save_timeline=lambda drawn: drawn.save(timeline_of_rank(timeline or "", training.job.rank)),
        )
        training.trainer.add_callback(callback)
        stack.callback(training.trainer.remove_callback, callback)
        stack.enter_context(callback.recording)
        _train(training, callback, has_checkpoints=checkpoints is not None)
    return Outcome(callback.status, callback.saved, callback.recorded)


def _train(training: Training, callback: RunCallback, *, has_checkpoints: bool) -> None:
    """Train to the end; a note on an error names the checkpoint that was saved."""
    first = training.step

    def note_saved(error: BaseException) -> None:
        if not isinstance(error, Exception):
            return  # a second signal ends the process at once
        if callback.is_model_saved:
            error.add_note("The trained model is saved.")
        if has_checkpoints and training.step > first and (note := _save_after_error(training, callback.saved)):
            error.add_note(note)

    with on_error(note_saved):
        training.train()
        if not callback.status and not callback.is_model_saved:  # an earlier run made the last step
            callback.save_model()


@contextlib.contextmanager
def _noting(
    training: Training, path: str | os.PathLike[str] | None, show: Callable[[StepRecord | EvalRecord], None]
) -> Iterator[Callable[[StepRecord | EvalRecord], None]]:
    """Yield a function that shows a record, and writes it into the metrics file in the first process."""
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


def _save_after_error(training: Training, saved: str | None) -> str | None:
    """Save the completed steps after an error, and return a note; an error of this save is only noted."""
    trainer = training.trainer
    # other processes may have completed a step that failed here, and a step that began to write cannot be undone
    can_undo = training.job.size == 1 and training.settings.update != "in_backward"
    is_whole = not trainer.in_step or (can_undo and not trainer.is_stepping)
    if not is_whole:
        return None

    def save() -> str:
        is_saved = saved is not None and saved.endswith(f"checkpoint-{training.step}")
        path = saved if is_saved else trainer.save()
        return f"The first {training.step} steps are saved in {path}. To continue: --resume"

    return result_or(save, lambda error: f"The first {training.step} steps could not be saved: {error}")


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
