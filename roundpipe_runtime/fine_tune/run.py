"""A training from its first step to its last, or until somebody stops it: checkpoints, metrics, a timeline."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable

from ..timeline.record import Timeline
from .interruption import Interruption
from .records import EvalRecord, MetricsFile, StepRecord
from .training import Training

__all__ = ["Outcome", "run"]

# The first steps are spent on finding out what a layer costs; the plan is settled behind them.
_RECORDED_STEP = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a training ended.

    Attributes:
        status: 0: it is through; 130: Ctrl-C; 143: SIGTERM.
        checkpoint: the last one that was written.
        recorded: the step for the timeline; after an interruption it may not have come.
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
) -> Outcome:
    """Do all steps that are left.

    Ctrl-C and SIGTERM let the step end, with the evaluation that belongs to it; then a checkpoint is written, from
    which the training goes on to the same bits. A second one ends the process at once.

    Args:
        training: what to do; after :meth:`Training.restore`, it goes on.
        checkpoints: their folder.
        every: steps between two of them; ``None`` for none but where it is stopped.
        keep: how many stay.
        at_end: whether to write one after the last step.
        metrics: a file for a line of JSON per step and evaluation; after a restore it is gone on with.
        timeline: a file for who computed what when, in one step.
        show: is called with each record.
    """
    recorded = None if timeline is None else min(training.step + _RECORDED_STEP, training.steps)
    saved, saved_at = None, -1
    with Interruption() as interruption, contextlib.ExitStack() as stack:
        file = None if metrics is None else stack.enter_context(MetricsFile(metrics, step=training.step))
        while training.step < training.steps:
            if interruption.status:
                if saved_at != training.step:
                    saved = training.save(checkpoints, keep=keep)
                return Outcome(interruption.status, saved, recorded)
            drawn = Timeline() if training.step + 1 == recorded else None
            for record in training.advance(drawn):
                if file is not None:
                    file.write(record)
                show(record)
            if drawn is not None and timeline is not None:
                drawn.save(timeline)
            is_last = training.step == training.steps
            if at_end if is_last else every is not None and training.step % every == 0:
                saved, saved_at = training.save(checkpoints, keep=keep), training.step
    return Outcome(0, saved, recorded)
