"""The Trainer that runs a training on text, one step at a time. Loading this file imports transformers."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from ..device.virtual import AcceleratorDevice
from ..engine.config import RoundPipeRunConfig
from ..huggingface.loss.call_options import CALL_OPTIONS, CallOptions
from ..huggingface.trainer.classes import RoundPipeTrainer
from ..huggingface.wrap import WrappedModel
from ..timeline.record import Timeline
from .blocks import Blocks
from .errors import FineTuneError
from .order import Order
from .settings import Settings

__all__ = ["TextTrainer", "read_notes"]

# What a training on text adds to the files of a checkpoint.
_NOTES = "fine_tune.json"


class TextTrainer(RoundPipeTrainer):
    """A ``RoundPipeTrainer`` for rows of tokens that pauses after each step.

    Args:
        pipeline: wrapped model.
        optimizer: optimizer of its optimizer parameters.
        blocks: tokenized text.
        settings: settings of the training.

    Attributes:
        timeline: timeline that records the next step. Default: ``None``, no record.
        notes: JSON object that each checkpoint stores, next to the number of microbatches.
        is_stepping: whether the optimizer may have written some parameters of a step, and not all.
    """

    def __init__(
        self, pipeline: WrappedModel, optimizer: torch.optim.Optimizer, blocks: Blocks, settings: Settings
    ) -> None:
        steps = settings.total_steps(len(blocks.training))
        args = TrainingArguments(
            output_dir=os.curdir,  # a Trainer creates it at once, and the folder of the checkpoints is not known yet
            max_steps=steps,
            per_device_train_batch_size=settings.batch,
            gradient_accumulation_steps=settings.accumulate,
            max_grad_norm=settings.clip or math.inf,
            seed=settings.seed,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            # of several processes the Trainer exchanges a few numbers, which are on the host
            use_cpu=pipeline.ranks.size > 1 or not any(isinstance(one, AcceleratorDevice) for one in pipeline.devices),
        )
        super().__init__(
            pipeline,
            args,
            train_dataset=_Rows(
                blocks, Order(blocks.training, seed=settings.seed), steps * settings.accumulate * settings.batch
            ),
            # each step sets its rate: a scheduler would go on with the one of the checkpoint, whatever `lr` is now
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        )
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = False  # rows have one length: the mean over batches is the mean over tokens
        self.blocks, self.settings = blocks, settings
        self.timeline: Timeline | None = None
        self.notes: dict[str, Any] = {}
        self.is_stepping = False
        self._losses: list[float] = []
        self._norm = math.nan
        self._clip = self.accelerator.clip_grad_norm_
        self.accelerator.clip_grad_norm_ = self._clip_if_finite

    @property
    def microbatches(self) -> int | None:
        """Number of microbatches per batch."""
        return self._rp_config.num_microbatch

    @microbatches.setter
    def microbatches(self, number: int) -> None:
        self._rp_config = RoundPipeRunConfig(num_microbatch=number, keep_parameters=self.settings.keep_parameters)

    def run(self, pause: Callable[[tuple[float, float]], None], *, checkpoint: str | None = None) -> None:
        """Train to the last step.

        Args:
            pause: function that is called before the first step, with a checkpoint loaded, and after each step, with
                its loss and the norm of its gradients before clipping.
            checkpoint: folder of the checkpoint to resume from. Default: none.

        Raises:
            FineTuneError: the loss or a gradient is not finite; the parameters are unchanged.
        """
        self.add_callback(_Pauses(self, pause))
        self.train(resume_from_checkpoint=checkpoint)

    def save_in(self, folder: str, *, keep: int | None) -> str:
        """Write a checkpoint.

        Args:
            folder: folder of the checkpoints.
            keep: number of checkpoints to keep; ``None`` keeps all.

        Returns:
            The folder of the checkpoint.
        """
        self.args.output_dir, self.args.save_total_limit = folder, keep
        self._save_checkpoint(self.model, None)
        return os.path.join(folder, f"checkpoint-{self.state.global_step}")

    def begin_step(self) -> None:
        """Set the learning rate, and record the step if that is wanted."""
        self._losses.clear()
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate(self.state.global_step, self.args.max_steps)
        if self.timeline is not None:
            self.timeline.__enter__()

    def end_step(self) -> tuple[float, float]:
        """Return the loss of the step, and the norm of its gradients before clipping."""
        if self.timeline is not None:
            self.timeline.__exit__(None, None, None)
        return math.fsum(self._losses), self._norm

    @torch.no_grad()
    def loss_of(self, rows: torch.Tensor) -> float:
        """Return the mean loss of rows of this process; their logits stay on the devices.

        Args:
            rows: indices of the rows.
        """
        ids = self.blocks.tokens[rows].long()
        options = {CALL_OPTIONS: CallOptions(loss_only=True)}
        was_training = self.pipeline.training
        self.pipeline.eval()
        output = self.pipeline(input_ids=ids, labels=ids, **options, roundpipe_run_config=self._rp_config)
        self.pipeline.train(was_training)
        return float(output.loss)

    # -- what the Trainer calls --------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        """Add the gradient of a batch, and return its share of the loss of the step."""
        loss = super().training_step(*args, **options)
        self._losses.append(self._finite("loss", loss.item()))
        return loss

    def _rp_global_batch(self) -> int:
        return self.settings.batch

    def _get_train_sampler(self, *args: Any) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if not self.args.should_save:
            return
        notes = {**self.notes, "microbatches": self.microbatches}
        (pathlib.Path(output_dir) / _NOTES).write_text(json.dumps(notes, indent=1), encoding="utf-8")

    def _clip_if_finite(self, *args: Any, **options: Any) -> torch.Tensor:
        norm: torch.Tensor = self._clip(*args, **options)
        self._norm = self._finite("norm of the gradients", norm.item())
        return norm

    def _finite(self, what: str, found: float) -> float:
        if math.isfinite(found):
            return found
        raise FineTuneError(
            f"Step {self.state.global_step + 1}: the {what} is {found}. Learn more slowly, or longer until the full "
            f"rate: --lr {self.settings.lr / 10:.2g}, --warmup {max(10, self.args.max_steps // 5)}"
        )


def read_notes(checkpoint: pathlib.Path) -> dict[str, Any]:
    """Return the notes of a checkpoint; those of another script's checkpoint are empty."""
    path = checkpoint / _NOTES
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


class _Pauses(TrainerCallback):  # type: ignore[misc] # transformers counts as untyped
    def __init__(self, trainer: TextTrainer, pause: Callable[[tuple[float, float]], None]) -> None:
        self.trainer = trainer
        self.pause = pause

    def on_train_begin(self, *args: Any, **options: Any) -> None:
        self.pause((math.nan, math.nan))

    def on_step_begin(self, *args: Any, **options: Any) -> None:
        self.trainer.begin_step()

    def on_pre_optimizer_step(self, *args: Any, **options: Any) -> None:
        self.trainer.is_stepping = True

    def on_step_end(self, *args: Any, **options: Any) -> None:
        self.trainer.is_stepping = False
        self.pause(self.trainer.end_step())


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens in an order; all of them are labels."""

    def __init__(self, blocks: Blocks, order: Order, count: int) -> None:
        self.blocks = blocks
        self.order = order
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        ids = self.blocks.tokens[self.order[place]].long()
        return {"input_ids": ids, "labels": ids}
