"""Define the Trainer of transformers for fine-tuning on text, and its callbacks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from yobx_flatten.core.files.document import read_document

from ..device.accelerator import AcceleratorDevice
from ..engine.config import RoundPipeRunConfig
from ..errors import DamagedCheckpointError, FineTuneError
from ..huggingface.loss.call_options import CALL_OPTIONS, CallOptions
from ..huggingface.trainer.classes import RoundPipeTrainer
from ..huggingface.wrap import WrappedModel
from ..schedule.timeline import Timeline
from .data.chat_rows import Rows
from .job import Interruption, Job
from .records import EvalRecord, StepRecord, device_peak, process_memory, record_of
from .settings import Settings

_NOTES = "fine_tune.json"  # additional file of a checkpoint


class TextTrainer(RoundPipeTrainer):
    """A ``RoundPipeTrainer`` for rows of tokens, of text or of conversations."""

    # notes: JSON object that each checkpoint stores in addition to the number of microbatches

    def __init__(
        self, pipeline: WrappedModel, optimizer: torch.optim.Optimizer, rows: Rows, settings: Settings, job: Job
    ) -> None:
        steps = settings.total_steps(len(rows.training))
        args = TrainingArguments(
            output_dir=os.curdir,  # created at once by a Trainer; the folder of the checkpoints is set later
            max_steps=steps,
            per_device_train_batch_size=settings.batch,
            per_device_eval_batch_size=settings.rows_of_group(pipeline.replicas),
            gradient_accumulation_steps=settings.accumulate,
            # infinite: the norm is only measured
            max_grad_norm=settings.clip or (0 if settings.update == "in_backward" else math.inf),
            seed=settings.seed,
            logging_strategy="no",  # RunCallback decides these three, since a checkpoint contains other intervals
            eval_strategy="no",
            save_strategy="no",
            report_to=list(settings.report_to),
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            # several processes exchange only CPU tensors
            use_cpu=pipeline.ranks.size > 1 or not any(isinstance(one, AcceleratorDevice) for one in pipeline.devices),
        )
        both = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: settings.rate(step, steps))
        super().__init__(pipeline, args, data_collator=rows.collate, train_dataset=rows, optimizers=both)
        self.remove_callback(PrinterCallback)
        if rows.lengths is None:  # all rows have the same length, so the mean over batches is the mean over tokens
            self.model_accepts_loss_kwargs = False
        self.rows, self.settings, self.job = rows, settings, job
        self.notes: dict[str, Any] = {}
        self.in_step = self.is_stepping = False
        self.seconds, self.losses = math.nan, list[float]()
        self._taken = self._order(0)

    @property
    def microbatches(self) -> int | None:
        return self._rp_config.num_microbatch

    @microbatches.setter
    def microbatches(self, number: int) -> None:
        self._rp_config = RoundPipeRunConfig(num_microbatch=number, keep_parameters=self.settings.keep_parameters)

    def _get_train_sampler(self, *args: Any) -> Sampler[int]:
        return self._order(self.args.max_steps * self.settings.accumulate * self.settings.batch)

    def _order(self, count: int) -> Order:
        rows, settings = self.rows, self.settings
        return Order(rows.training, seed=settings.seed, count=count, lengths=rows.lengths, batch=settings.batch)

    def _rp_global_batch(self) -> int:
        return self.settings.batch

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(*args, **options)
        self.losses.append(self._finite("loss", loss.item()))
        return loss

    def _rp_clip_grad_norm(self, *args: Any, **options: Any) -> torch.Tensor:
        norm = super()._rp_clip_grad_norm(*args, **options)
        self._finite("norm of the gradients", norm.item())
        return norm

    def _finite(self, what: str, found: float) -> float:
        if math.isfinite(found):
            return found
        raise FineTuneError(
            f"Step {self.state.global_step + 1}: the {what} is {found}. Use a lower learning rate, or a longer "
            f"warmup: --lr {self.settings.lr / 10:.2g}, --warmup {max(10, self.args.max_steps // 5)}"
        )

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        if "loss" in logs:
            size = self.settings.accumulate * self.settings.batch
            end = self.state.global_step * size
            tokens = self.rows.tokens_in([self._taken[place] for place in range(end - size, end)])  # of all processes
            logs = {**logs, "loss": math.fsum(self.losses), "tokens": tokens, "seconds": self.seconds}
            logs |= {"tokens_per_s": tokens / self.seconds, "process_bytes": process_memory()}
            if (peak := device_peak(self.pipeline.devices)) is not None:
                logs["device_bytes"] = peak
        super().log(logs, *args, **options)

    def get_eval_dataloader(self, eval_dataset: object = None) -> DataLoader[Any]:
        """Return the evaluation batches of this process; all processes together evaluate all held-out rows."""
        size: int = self.args.per_device_eval_batch_size
        batches = list(BatchSampler(self.rows.held_out.tolist(), size, drop_last=False))
        return DataLoader(
            self.train_dataset, batch_sampler=batches[self.job.rank :: self.job.size], collate_fn=self.data_collator
        )

    def evaluation_loop(
        self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **options: Any
    ) -> EvalLoopOutput:
        """Compute the mean loss over tokens. The Trainer of transformers averages over rows instead."""
        self.pipeline.synchronize()
        self.callback_handler.eval_dataloader = dataloader
        found = self.job.exchange(self.job.together(lambda: [self._loss_of(batch) for batch in dataloader]))
        # in row order, so that the sum does not depend on the number of processes
        losses = [found[number % len(found)][number // len(found)] for number in range(sum(map(len, found)))]
        loss = math.fsum(loss * count for loss, count in losses) / sum(count for _, count in losses)
        tokens = self.rows.tokens_in(self.rows.held_out.tolist())
        metrics = {f"{metric_key_prefix}_loss": loss, f"{metric_key_prefix}_tokens": tokens}
        return EvalLoopOutput(None, None, metrics, num_samples=len(self.rows.held_out))

    @torch.no_grad()
    def _loss_of(self, batch: dict[str, torch.Tensor]) -> tuple[float, int]:
        """Return the mean loss of a batch, and the number of tokens over which the mean is taken."""
        how, was_training = {CALL_OPTIONS: CallOptions(loss_only=True)}, self.pipeline.training  # no logits
        self.pipeline.eval()
        output = self.pipeline(**batch, **how, roundpipe_run_config=self._rp_config)
        self.pipeline.train(was_training)
        self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        return float(output.loss), int((batch["labels"][:, 1:] != -100).sum())

    def save(self) -> str:
        self._save_checkpoint(self.model, None)
        return os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if not self.args.should_save:
            return
        notes = {**self.notes, "microbatches": self.microbatches}
        (pathlib.Path(output_dir) / _NOTES).write_text(json.dumps(notes, indent=1), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        # the learning rate comes from the current settings, not from the checkpoint
        scheduler = self.lr_scheduler
        rate = self.settings.lr * self.settings.rate(scheduler.last_epoch, self.args.max_steps)
        scheduler.base_lrs = [self.settings.lr for _ in scheduler.base_lrs]
        scheduler._last_lr = [rate for _ in scheduler.base_lrs]
        for group in self.optimizer.param_groups:
            group["lr"] = rate


def read_notes(checkpoint: pathlib.Path) -> dict[str, Any]:
    """Return the settings that are stored in a checkpoint; ``{}`` if no settings are stored."""
    path = checkpoint / _NOTES
    return read_document(path, dict[str, Any], failure=DamagedCheckpointError, finite=False) if path.exists() else {}


# The order of training rows is new in each epoch and made from the seed, so that any batch can be found again.
_BUCKET = 50  # batches within which rows are sorted by length: more would shuffle less, fewer would pad more
_STRIDE = 0x9E3779B97F4A7C15  # spreads the seeds of neighbouring epochs


class Order(Sampler[int]):
    """A sampler that yields every training row once per epoch, for as many epochs as the training needs.

    The last batch of an epoch is filled with rows of the next epoch, so all batches have the same size.

    >>> order = Order(torch.arange(3), seed=0, count=6)
    >>> sorted(order[place] for place in range(3)), len(list(order))
    ([0, 1, 2], 6)
    """

    # count: number of rows to iterate over; by default, one epoch
    # lengths: tokens of each row, so that rows of similar length are in one batch; `None` if all are equally long

    def __init__(
        self,
        rows: torch.Tensor,
        *,
        seed: int,
        count: int | None = None,
        lengths: torch.Tensor | None = None,
        batch: int = 1,
    ) -> None:
        self.rows, self.seed, self.count = rows, seed, len(rows) if count is None else count
        self.lengths, self.batch = lengths, batch
        self._epoch, self._shuffled = -1, rows

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return (self[place] for place in range(self.count))

    def __getitem__(self, place: int) -> int:
        """Return the row at an index, where index 0 is the first row of the first epoch."""
        epoch, number = divmod(place, len(self.rows))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self.seed + _STRIDE * (epoch + 1)) % 2**63)
            shuffled = self.rows[torch.randperm(len(self.rows), generator=generator)]
            if self.lengths is not None:  # sort each bucket by length, cut into batches, and shuffle the batches
                parts = shuffled.split(_BUCKET * self.batch)
                buckets = [part[self.lengths[part].argsort(stable=True)] for part in parts]
                batches = torch.cat(buckets).split(self.batch)
                order = torch.randperm(len(batches), generator=generator)
                shuffled = torch.cat([batches[int(number)] for number in order])
            self._shuffled, self._epoch = shuffled, epoch
        return int(self._shuffled[number])


@dataclasses.dataclass(eq=False, repr=False)
class RunCallback(TrainerCallback):  # type: ignore[misc] # transformers counts as untyped
    """Decides after each step whether the Trainer logs, evaluates and saves."""

    # on_log forwards the record of a step or an evaluation; after a signal, it requests a checkpoint and the end
    trainer: TextTrainer
    interruption: Interruption
    every: int | None  # steps between two checkpoints; `None` for none
    # whether to write a checkpoint after the last step; `None` writes no checkpoint, not even after a signal
    at_end: bool | None
    note: Callable[[StepRecord | EvalRecord], None]  # function that is called with each record
    save_model: Callable[[], object]
    recorded: int | None  # step of the timeline; `None` for no timeline
    save_timeline: Callable[[Timeline], object]

    def __post_init__(self) -> None:
        self.recording, self.timeline = contextlib.ExitStack(), Timeline()
        self.status, self.begin = 0, math.nan
        self.saved: str | None = None
        self.is_model_saved = False

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **options: Any) -> None:
        # here, and not at the end of a step, since a step that failed has left its losses
        self.trainer.losses.clear()
        self.trainer.in_step, self.trainer.is_stepping, self.begin = True, False, time.perf_counter()
        if state.global_step + 1 == self.recorded:
            self.recording.enter_context(self.timeline)

    def on_pre_optimizer_step(self, *args: Any, **options: Any) -> None:
        self.trainer.is_stepping = True

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **options: Any) -> None:
        self.trainer.seconds = time.perf_counter() - self.begin
        self.trainer.in_step = self.trainer.is_stepping = False
        step, is_last = state.global_step, state.global_step == args.max_steps
        self.recording.close()
        control.should_log = True
        control.should_evaluate = len(self.trainer.rows.held_out) > 0 and (
            is_last or _is_due(step, self.trainer.settings.eval_every)
        )
        control.should_save = bool(self.at_end) if is_last else _is_due(step, self.every)

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Mapping[str, float], **options: Any
    ) -> None:
        record = record_of(logs, state.global_step)
        if record is None:  # the summary that the Trainer logs at the end
            return
        is_last, job = state.global_step == args.max_steps, self.trainer.job
        if is_last and isinstance(record, StepRecord):
            self.save_model()
            self.is_model_saved = True
        job.together(functools.partial(self.note, record))
        if state.global_step == self.recorded and isinstance(record, StepRecord):
            job.together(functools.partial(self.save_timeline, self.timeline))
        # a signal may reach each process in a different step, so all stop at the maximum status
        if not is_last and (status := max(job.exchange(self.interruption.status))):
            self.status = status
            control.should_training_stop = True
            control.should_save = self.at_end is not None

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **options: Any) -> None:
        self.saved = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
