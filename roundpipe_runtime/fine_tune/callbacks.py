"""Callbacks of a training: records, evaluation, checkpoints, and the end after a signal.

Loading this file imports transformers.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sized
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from ..timeline.record import Timeline
from .interruption import Interruption
from .records import EvalRecord, StepRecord, record_of

if TYPE_CHECKING:  # it imports this file where it runs
    from .training import Training


class RunCallback(TrainerCallback):  # type: ignore[misc] # transformers counts as untyped
    """Decides after each step what the Trainer does next, and forwards its logs.

    ::

        step_end   log? evaluate? save?
        log        the record of the step   a signal: save, and stop
        log        that of the evaluation   likewise
        save       where
    """

    # every: steps between two checkpoints; `None` for none
    # at_end: whether to write a checkpoint after the last step; `None` for none at all, after signals neither
    # note: function that is called with each record
    # show_evaluation: function that is called after each batch of an evaluation, with how many are done, and all
    # recorded: step of the timeline; `None` for no timeline

    def __init__(
        self,
        training: Training,
        interruption: Interruption,
        *,
        every: int | None,
        at_end: bool | None,
        note: Callable[[StepRecord | EvalRecord], None],
        show_evaluation: Callable[[int, int], None],
        save_model: Callable[[], object],
        recorded: int | None,
        save_timeline: Callable[[Timeline], object],
    ) -> None:
        self.training, self.interruption = training, interruption
        self.every, self.at_end = every, at_end
        self.note, self.show_evaluation, self.save_model = note, show_evaluation, save_model
        self.evaluated = 0
        self.recorded, self.save_timeline = recorded, save_timeline
        self.recording = contextlib.ExitStack()
        self.timeline = Timeline()
        self.status = 0
        self.saved: str | None = None
        self.is_model_saved = False

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **options: Any) -> None:
        """Record the step, if it is the one of the timeline."""
        if state.global_step + 1 == self.recorded:
            self.recording.enter_context(self.timeline)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **options: Any) -> None:
        """Decide on logging, saving and evaluation after the step."""
        step, is_last = state.global_step, state.global_step == args.max_steps
        self.recording.close()
        control.should_log = True
        control.should_evaluate = len(self.training.blocks.held_out) > 0 and (
            is_last or _is_due(step, self.training.settings.eval_every)
        )
        control.should_save = bool(self.at_end) if is_last else _is_due(step, self.every)

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Sized, **options: Any
    ) -> None:
        """Count the batches of an evaluation."""
        self.evaluated += 1
        self.show_evaluation(self.evaluated, len(eval_dataloader))

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Mapping[str, float], **options: Any
    ) -> None:
        """Pass on the record of a step or an evaluation, and stop after a signal."""
        record = record_of(logs, state.global_step)
        if record is None:  # the Trainer's own at the end
            return
        is_last, job = state.global_step == args.max_steps, self.training.job
        self.evaluated = 0
        if is_last and isinstance(record, StepRecord):
            self.save_model()
            self.is_model_saved = True
        job.together(functools.partial(self.note, record))
        if state.global_step == self.recorded and isinstance(record, StepRecord):
            job.together(functools.partial(self.save_timeline, self.timeline))
        # a signal reaches processes in different steps
        if not is_last and (status := max(job.exchange(self.interruption.status))):
            self.status = status
            control.should_training_stop = True
            control.should_save = self.at_end is not None

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **options: Any) -> None:
        """Note the checkpoint that was written."""
        self.saved = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
