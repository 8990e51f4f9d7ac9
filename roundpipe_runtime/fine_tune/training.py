"""Fine-tune a model step by step: batches, the pipeline, AdamW on the host, evaluation and checkpoints."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import time
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

from yobx_flatten.errors.dependencies import require

from ..checkpoint import CheckpointError
from ..device.virtual import parse_devices
from ..huggingface.wrap import WrappedModel, wrap_model_to_roundpipe
from ..timeline.record import Timeline
from .blocks import Blocks
from .errors import FineTuneError
from .memory import device_peak, process_memory
from .records import EvalRecord, StepRecord
from .settings import Settings
from .turns import in_turns

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
        optimizer: AdamW, on the host.
        trainer: Trainer that runs the steps.

    Raises:
        ConfigError: the devices do not exist.
        FineTuneError: the model is not causal, or rows are longer than it can take.
        MissingDependencyError: transformers or accelerate is not installed.
    """

    def __init__(self, model: nn.Module, blocks: Blocks, settings: Settings) -> None:
        require("transformers", "accelerate", purpose="a training on text", extra="transformers,train")
        from .trainer import TextTrainer

        self.model = model
        self.blocks = blocks
        self.settings = settings
        devices = parse_devices(settings.devices)
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
        self.trainer = TextTrainer(self.pipeline, self.optimizer, blocks, settings)
        self.trainer.microbatches = settings.microbatches or min(len(devices) + 1, settings.batch)
        self._pauses: Generator[tuple[float, float]] | None = None
        torch.manual_seed(settings.seed)  # the seed that dropout counts from, whatever the check has drawn

    @property
    def step(self) -> int:
        """Number of steps done."""
        return int(self.trainer.state.global_step)

    @property
    def steps(self) -> int:
        """Number of all steps."""
        return int(self.trainer.args.max_steps)

    @property
    def microbatches(self) -> int | None:
        """Number of microbatches per batch."""
        return self.trainer.microbatches

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
        pauses = self._pauses or self._start()
        begin = time.perf_counter()
        self.trainer.timeline = timeline
        loss, norm = next(pauses)
        seconds = time.perf_counter() - begin
        tokens = self.settings.accumulate * self.settings.batch * self.blocks.length
        yield StepRecord(
            step=self.step,
            loss=loss,
            tokens=tokens,
            tokens_per_s=tokens / seconds,
            lr=self.settings.learning_rate(self.step - 1, self.steps),
            grad_norm=norm,
            seconds=seconds,
            process_bytes=process_memory(),
            device_bytes=device_peak(self.pipeline.devices),
        )
        every = self.settings.eval_every
        is_due = self.step == self.steps or (every is not None and self.step % every == 0)
        if is_due and len(self.blocks.held_out):
            yield self.evaluate()

    def evaluate(self) -> EvalRecord:
        """Return the loss of the held-out rows."""
        begin = time.perf_counter()
        loss = self.trainer.evaluate()["eval_loss"]
        return EvalRecord(
            self.step, loss, self.blocks.held_out.numel() * self.blocks.length, time.perf_counter() - begin
        )

    def close(self) -> None:
        """End the threads. The model keeps the trained weights, the state of the optimizer is discarded."""
        if self._pauses is not None:
            self._pauses.close()
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
        self.trainer.notes = {"same": self._same()}
        return self.trainer.save_in(os.path.abspath(folder), keep=keep)

    def restore(self, folder: str | os.PathLike[str]) -> bool:
        """Continue where the last checkpoint was saved, and return whether there was one.

        Unless the settings state otherwise, batches are cut into as many microbatches as they were, so that the results
        are bitwise identical on any number of devices.

        Args:
            folder: folder that :meth:`save` was given.

        Raises:
            FineTuneError: the checkpoint is of another text, or of other batches.
            CheckpointError: the checkpoint is of another model.
        """
        from ..huggingface.trainer.checkpoints import newest_whole
        from .trainer import read_notes

        found = newest_whole(pathlib.Path(folder))
        if found is None:
            return False
        notes = read_notes(found)
        self._check_same(notes.get("same", {}), os.fspath(folder))
        step = int(found.name.rpartition("-")[2])
        if step > self.steps:
            raise FineTuneError(f"{folder} is at step {step}, and --steps is {self.steps}. Ask for more.")
        if self.settings.microbatches is None:
            self.trainer.microbatches = notes["microbatches"]
        self._start(os.fspath(found))
        return True

    def _start(self, checkpoint: str | None = None) -> Generator[tuple[float, float]]:
        """Let the Trainer come to its first step; what a checkpoint holds is loaded then."""
        self._pauses = in_turns(functools.partial(self.trainer.run, checkpoint=checkpoint))
        next(self._pauses)
        return self._pauses

    def _same(self) -> dict[str, Any]:
        """The settings that must be the same for a place in the data to mean the same."""
        settings = self.settings
        return {
            "length": self.blocks.length,
            "batch": settings.batch,
            "accumulate": settings.accumulate,
            "seed": settings.seed,
            "model": _names_and_shapes(self.model),
            "text": self.blocks.digest,
            "eval-share": len(self.blocks.held_out),
        }

    def _check_same(self, before: dict[str, Any], folder: str) -> None:
        now = self._same()
        for name in now:
            if name == "model" and before.get(name) not in (None, now[name]):
                raise CheckpointError(
                    f"{folder}: The checkpoint is of another model. Names or shapes of weights differ."
                )
            if before.get(name) != now[name]:
                was = f"--{name} {before.get(name)}" if name in ("length", "batch", "accumulate", "seed") else ""
                raise FineTuneError(
                    f"{folder} was trained with {was or f'another --{name}'}. Go on with the same, or begin anew in "
                    "another folder: --checkpoint DIR"
                )

    def _groups(self) -> list[dict[str, Any]]:
        """Weights decay; parameters with one axis, norms and biases, do not."""
        trainable = [p for p in self.pipeline.optim_parameters() if p.requires_grad]
        decaying = [p for p in trainable if p.dim() > 1]
        others = [p for p in trainable if p.dim() <= 1]
        groups = [(decaying, self.settings.weight_decay), (others, 0.0)]
        return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def _names_and_shapes(model: nn.Module) -> str:
    shapes = sorted(
        (name, tuple(parameter.shape), parameter.requires_grad) for name, parameter in model.named_parameters()
    )
    return hashlib.sha256(repr(shapes).encode()).hexdigest()


def _check_causal(model: nn.Module) -> None:
    """Refuse a model whose prediction depends on what it predicts, as encoders do: its loss would mean nothing."""
    one = torch.tensor([[3, 4, 5, 6]])
    other = torch.tensor([[3, 4, 5, 7]])
    was_training = model.training
    model.eval()
    with torch.no_grad():
        first, second = (model(input_ids=ids).logits[:, :3] for ids in (one, other))
    model.train(was_training)
    # experts are given other tokens with these, and round otherwise
    rounding = 1e-4 if first.dtype == torch.float32 else 2e-2
    if (first - second).float().norm() > rounding * first.float().norm():
        raise FineTuneError(
            f"{type(model).__name__} sees the token that it is to predict, so it cannot learn text this way. Is it an "
            'encoder? Then config.json wants "is_decoder": true'
        )
