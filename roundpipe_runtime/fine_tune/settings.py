"""Settings of a training: batches, steps, learning rate, devices, dtypes, memory and evaluation."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch

from ..device.accelerator import DeviceSpec
from ..device.disk import HOST_IN_MEMORY, disk_folder
from ..engine.config import RoundPipeRunConfig
from ..errors import ConfigError
from ..optim.layer_contents import LargeTables, check_large_tables
from ..optim.parameters import Update


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a training: batches, learning, devices, dtypes, memory and evaluation.

    Attributes:
        batch: number of rows per batch, summed over all processes.
        microbatches: number of microbatches per batch, or per group if batches are split into groups (default: the
            number of devices + 1, but at most the number of rows).
        replicas: number of groups into which a batch is split (default: the number of processes). With ``N`` processes,
            process ``g % N`` trains group ``g``. For a given number of groups, results do not depend on ``N``. A single
            process does not split a batch into groups by default.
        accumulate: number of batches per optimizer step, whose gradients are averaged.
        steps: number of optimizer steps; ``None`` to use ``epochs``.
        epochs: number of passes over all rows, if ``steps`` is not given.
        lr: peak learning rate.
        warmup: number of steps until the learning rate reaches its peak (default: a tenth of all steps, at most 100).
        schedule: learning rate after the warmup: ``"cosine"`` or ``"linear"`` decay to zero, or ``"constant"``.
        weight_decay: weight decay of AdamW, which applies to parameters with two axes or more.
        clip: largest total norm of the gradients. Larger gradients are scaled down. With 0, gradients are not clipped.
        seed: seed of the order of rows, and of dropout.
        devices: devices that train the model, as for :class:`RoundPipe`.
        optim_dtype: dtype of gradients, moments and master weights. Default: float32.
        keep_parameters: GB of parameters that stay on each device between steps, or ``"auto"``, as in
            :class:`RoundPipeRunConfig`. This setting does not change the results.
        large_tables: whether large embedding and head matrices are copied whole or in parts, as in :class:`RoundPipe`.
        host: where parameters, gradients, master weights and moments are stored, ``"memory"`` or ``"disk:DIR"``, as in
            :class:`RoundPipe`. This setting does not change the results.
        update: which weights the optimizer updates, and when, as in :class:`RoundPipe`. This setting does not change
            the results.
        eval_every: number of steps between two evaluations; ``None`` evaluates only at the end.
        check: whether to compare the split model with the original model before the training.
        report_to: additional targets of the Trainer's logs: ``"tensorboard"``, ``"wandb"``, ``"mlflow"`` and others.

    Raises:
        ConfigError: a field has an invalid value.
    """

    batch: int = 8
    microbatches: int | None = None
    replicas: int | None = None
    accumulate: int = 1
    steps: int | None = None
    epochs: int = 1
    lr: float = 3e-4
    warmup: int | None = None
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    devices: DeviceSpec = None
    optim_dtype: torch.dtype | None = torch.float32
    keep_parameters: float | Literal["auto"] = 0
    large_tables: LargeTables = "auto"
    host: str = HOST_IN_MEMORY
    update: Update = "masters"
    eval_every: int | None = None
    check: bool = True
    report_to: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("batch", "accumulate", "epochs", "microbatches", "replicas", "steps", "eval_every", "warmup"):
            found, least = getattr(self, name), int(name != "warmup")
            may_be_missing = name not in ("batch", "accumulate", "epochs")
            if not (found is None and may_be_missing) and (type(found) is not int or found < least):
                raise ConfigError(f"{name} must be a whole number of at least {least}, found {found!r}.")
        groups = self.replicas or 1
        if groups > self.batch:
            raise ConfigError(
                f"A batch of {self.batch} rows cannot be split into {groups} groups. Use a larger batch, or fewer "
                f"groups: --batch {groups}, or --replicas {self.batch}"
            )
        rows = self.rows_of_group(groups)
        if self.microbatches is not None and self.microbatches > rows:
            what = f"A batch of {self.batch} rows" if groups == 1 else f"A group of {rows} rows"
            raise ConfigError(
                f"{what} cannot be split into {self.microbatches} microbatches. Use a larger batch, or fewer "
                f"microbatches: --batch {groups * self.microbatches}, or --microbatches {rows}"
            )
        if not self.lr > 0 or not math.isfinite(self.lr):
            raise ConfigError(f"lr must be a number above 0, like 3e-4, found {self.lr!r}.")
        for name in ("weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number of at least 0, found {getattr(self, name)!r}.")
        if self.schedule not in ("cosine", "linear", "constant"):
            raise ConfigError(f'schedule must be "cosine", "linear" or "constant", found {self.schedule!r}.')
        check_large_tables(self.large_tables)
        RoundPipeRunConfig(keep_parameters=self.keep_parameters)  # raises if the value is invalid
        disk_folder(self.host)
        if self.update == "in_backward" and (self.clip or self.accumulate > 1):
            raise ConfigError(
                "--update in_backward updates each layer during the backward pass, so gradients cannot be clipped by "
                "their total norm or accumulated. Add: --clip 0 --accumulate 1; or use: --update in_place"
            )

    def rows_of_group(self, replicas: int) -> int:
        """Return the number of rows in the largest of the groups into which a batch is split.

        Args:
            replicas: number of groups.
        """
        return -(-self.batch // replicas)

    def total_steps(self, rows: int) -> int:
        """Return the number of optimizer steps of the training.

        Args:
            rows: number of training rows.

        >>> Settings(batch=4, epochs=2).total_steps(10), Settings(batch=4, steps=7).total_steps(10)
        (5, 7)
        """
        return self.steps or math.ceil(self.epochs * rows / (self.batch * self.accumulate))

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step, divided by ``lr``. The learning rate of the first step is above 0.

        Args:
            step: number of the step, counted from 0.
            steps: number of all steps.

        >>> settings = Settings(warmup=2, schedule="linear")
        >>> [settings.rate(step, 6) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
        """
        # in the schedules of transformers, the first step of a warmup has the rate 0
        warmup = min(100, steps // 10) if self.warmup is None else self.warmup
        if step < warmup:
            return (step + 1) / warmup
        gone = (step - warmup) / max(1, steps - warmup)
        if self.schedule == "cosine":
            return (1 + math.cos(math.pi * gone)) / 2
        return 1 - gone if self.schedule == "linear" else 1.0
