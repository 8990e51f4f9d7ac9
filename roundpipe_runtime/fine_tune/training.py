"""Fine-tune a model step by step: batches, the pipeline, AdamW on the host, evaluation and checkpoints."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..checkpoint import CheckpointError, list_checkpoints, load_checkpoint, save_checkpoint
from ..device.virtual import parse_devices
from ..engine.config import RoundPipeRunConfig
from ..huggingface.loss.call_options import CALL_OPTIONS, CallOptions
from ..huggingface.wrap import WrappedModel, wrap_model_to_roundpipe
from ..timeline.record import Timeline
from .blocks import Blocks
from .errors import FineTuneError
from .memory import device_peak, process_memory
from .order import Order
from .records import EvalRecord, StepRecord
from .settings import Settings

__all__ = ["Training"]


class Training:
    """Fine-tunes a causal language model through a pipeline.

    ::

        with Training(model, blocks, Settings(batch=8, steps=100, devices="virtual:2")) as training:
            for record in training:
                print(record.step, record.loss)

    The same rows, settings and number of microbatches give bitwise identical results, on any number of devices, and
    across :meth:`save` and :meth:`restore`.

    Args:
        model: causal language model of transformers, or PEFT's model around one; it is trained in place.
        blocks: tokenized text.
        settings: settings of the training.

    Attributes:
        pipeline: wrapped model.
        microbatches: number of microbatches per batch.
        step: number of steps done.
        steps: number of all steps.

    Raises:
        ConfigError: the devices do not exist.
        FineTuneError: the model is not causal, or rows are longer than it can take.
    """

    def __init__(self, model: nn.Module, blocks: Blocks, settings: Settings) -> None:
        self.model = model
        self.blocks = blocks
        self.settings = settings
        self.step = 0
        self.steps = settings.total_steps(len(blocks.training))
        devices = parse_devices(settings.devices)
        self.microbatches = settings.microbatches or min(len(devices) + 1, settings.batch)
        if settings.check:
            _check_causal(model)
        torch.manual_seed(settings.seed)
        self.pipeline: WrappedModel = wrap_model_to_roundpipe(
            model,
            lower_threshold=0,
            name="train",
            check=settings.check,
            devices=devices,
            optim_dtype=settings.optim_dtype,
        )
        self.optimizer = torch.optim.AdamW(self._groups(), lr=settings.lr, fused=True)
        self._order = Order(blocks.training, seed=settings.seed)
        self._evaluated = -1
        torch.manual_seed(settings.seed)  # the seed that dropout counts from, whatever the check has drawn

    def __enter__(self) -> Training:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[StepRecord | EvalRecord]:
        while self.step < self.steps:
            yield from self.advance()

    def advance(self, timeline: Timeline | None = None) -> Iterator[StepRecord | EvalRecord]:
        """Do one step, and the evaluation that is due after it; yield the record of each.

        Args:
            timeline: timeline that records the step.

        Raises:
            FineTuneError: the loss or a gradient is not finite; the parameters are unchanged.
        """
        with timeline or contextlib.nullcontext():
            record = self._learn()
        yield record
        every = self.settings.eval_every
        is_due = self.step == self.steps or (every is not None and self.step % every == 0)
        if is_due and len(self.blocks.held_out):
            yield self.evaluate()

    def evaluate(self) -> EvalRecord:
        """Return the loss of the held-out rows."""
        begin = time.perf_counter()
        was_training = self.pipeline.training
        self.pipeline.eval()
        losses = []
        with torch.no_grad():
            for rows in self.blocks.held_out.split(self.settings.batch):
                batch = {**self._batch(rows), CALL_OPTIONS: CallOptions(loss_only=True)}
                output = self.pipeline(**batch, roundpipe_run_config=self._config())
                losses.append(output.loss.item() * len(rows))
        self.pipeline.train(was_training)
        count = len(self.blocks.held_out)
        tokens = count * self.blocks.length
        return EvalRecord(self.step, math.fsum(losses) / count, tokens, time.perf_counter() - begin)

    def close(self) -> None:
        """End the threads. The model keeps the trained weights, the state of the optimizer is discarded."""
        self.pipeline.synchronize()
        self.pipeline.close()
        self.optimizer.state.clear()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str], *, keep: int | None = 3) -> str:
        """Write a checkpoint, from which :meth:`restore` continues bitwise identically.

        Args:
            folder: folder of the checkpoints of this training.
            keep: number of checkpoints to keep; ``None`` keeps all.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: something cannot be stored.
            OSError: the checkpoint could not be written.
        """
        data = {"step": self.step, "same": self._same(), "microbatches": self.microbatches}
        return str(save_checkpoint(folder, self.pipeline, optimizer=self.optimizer, data=data, keep=keep))

    def restore(self, folder: str | os.PathLike[str]) -> bool:
        """Continue where the last checkpoint was saved, and return whether there was one.

        Unless the settings say otherwise, batches are cut into as many microbatches as they were, so that the results
        are bitwise identical on any number of devices.

        Args:
            folder: folder that :meth:`save` was given.

        Raises:
            FineTuneError: the checkpoint is of another text, or of other batches.
            CheckpointError: the checkpoint is of another model.
        """
        folder = os.fspath(folder)
        if not list_checkpoints(folder):
            return False
        try:
            data = load_checkpoint(folder, self.pipeline, optimizer=self.optimizer) or {}
        except CheckpointError as error:
            raise type(error)(f"{folder}: {error}") from error
        self._check_same(data.get("same", {}), folder)
        if data["step"] > self.steps:
            raise FineTuneError(f"{folder} is at step {data['step']}, and --steps is {self.steps}. Ask for more.")
        self.step = data["step"]
        if self.settings.microbatches is None:
            self.microbatches = data["microbatches"]
        return True

    def _same(self) -> dict[str, Any]:
        """The settings that must be the same for a place in the data to mean the same."""
        settings = self.settings
        return {
            "length": self.blocks.length,
            "batch": settings.batch,
            "accumulate": settings.accumulate,
            "seed": settings.seed,
            "text": self.blocks.digest,
            "eval-share": len(self.blocks.held_out),
        }

    def _check_same(self, before: dict[str, Any], folder: str) -> None:
        now = self._same()
        for name in now:
            if before.get(name) != now[name]:
                was = f"--{name} {before.get(name)}" if name in ("length", "batch", "accumulate", "seed") else ""
                raise FineTuneError(
                    f"{folder} was trained with {was or f'another --{name}'}. Go on with the same, or begin anew in "
                    "another folder: --checkpoint DIR"
                )

    # -- a step ------------------------------------------------------------------------------------------------------

    def _learn(self) -> StepRecord:
        begin = time.perf_counter()
        settings = self.settings
        losses = []
        for number in range(settings.accumulate):
            place = (self.step * settings.accumulate + number) * settings.batch
            batch = self._batch(self._order.take(place, settings.batch))
            losses.append(self.pipeline.forward_backward(input_kwargs=batch, run_config=self._config()).item())
        loss = math.fsum(losses) / len(losses)
        if not math.isfinite(loss):
            raise FineTuneError(self._not_finite("loss", loss))
        rate = settings.learning_rate(self.step, self.steps)
        norms: list[float] = []
        self.pipeline.step(lambda: norms.append(self._update(rate)))
        self.step += 1
        seconds = time.perf_counter() - begin
        tokens = settings.accumulate * settings.batch * self.blocks.length
        return StepRecord(
            step=self.step,
            loss=loss,
            tokens=tokens,
            tokens_per_s=tokens / seconds,
            lr=rate,
            grad_norm=norms[0],
            seconds=seconds,
            process_bytes=process_memory(),
            device_bytes=device_peak(self.pipeline.devices),
        )

    def _config(self) -> RoundPipeRunConfig:
        return RoundPipeRunConfig(num_microbatch=self.microbatches)

    def _batch(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        ids = self.blocks.tokens[rows].long()
        return {"input_ids": ids, "labels": ids}

    def _update(self, rate: float) -> float:
        """Clip the gradients, step, and clear them; return their norm before clipping."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.settings.accumulate > 1:
            torch._foreach_mul_(gradients, 1 / self.settings.accumulate)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.clip or math.inf).item()
        if not math.isfinite(norm):
            raise FineTuneError(self._not_finite("norm of the gradients", norm))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _not_finite(self, what: str, found: float) -> str:
        return (
            f"Step {self.step + 1}: the {what} is {found}. Learn more slowly, or longer until the full rate: "
            f"--lr {self.settings.lr / 10:.2g}, --warmup {max(10, self.steps // 5)}"
        )

    def _groups(self) -> list[dict[str, Any]]:
        """Weights decay; parameters with one axis, norms and biases, do not."""
        learning = [p for p in self.pipeline.optim_parameters() if p.requires_grad]
        decaying = [p for p in learning if p.dim() > 1]
        others = [p for p in learning if p.dim() <= 1]
        groups = [(decaying, self.settings.weight_decay), (others, 0.0)]
        return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def _check_causal(model: nn.Module) -> None:
    """Refuse a model whose prediction depends on what it predicts, as encoders do: its loss would mean nothing."""
    one = torch.tensor([[3, 4, 5, 6]])
    other = torch.tensor([[3, 4, 5, 7]])
    was_training = model.training
    model.eval()
    with torch.no_grad():
        first, second = (model(input_ids=ids).logits[:, :3] for ids in (one, other))
    model.train(was_training)
    # experts are given other tokens beside these, and round otherwise
    rounding = 1e-4 if first.dtype == torch.float32 else 2e-2
    if (first - second).float().norm() > rounding * first.float().norm():
        raise FineTuneError(
            f"{type(model).__name__} sees the token that it is to predict, so it cannot learn text this way. Is it an "
            'encoder? Then config.json wants "is_decoder": true'
        )
