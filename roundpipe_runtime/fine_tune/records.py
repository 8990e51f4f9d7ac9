"""Records of training steps and evaluations, memory in use, and the JSON lines file that stores records.

::

    {"step": 1, "loss": 5.58, "tokens": 2048, "tokens_per_s": 9120.4, "lr": 3e-05, "grad_norm": 2.9, ...}
    {"step": 20, "eval_loss": 3.31, "eval_tokens": 4096, "seconds": 0.19}
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

import torch

from yobx_flatten.files.document import read_text
from yobx_flatten.files.scratch import write_text

from ..device.accelerator import AcceleratorDevice
from ..device.protocol import Device
from ..errors import FineTuneError


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """Metrics of one training step.

    Attributes:
        step: number of the step, counted from 1.
        loss: mean over the tokens of the step, before the update.
        tokens: number of tokens of the step.
        tokens_per_s: tokens per second of this step, including copies and optimizer.
        lr: learning rate.
        grad_norm: norm of all gradients, before clipping; ``None`` with ``update="in_backward"``.
        seconds: duration of the step.
        process_bytes: memory of the process, after the step.
        device_bytes: peak bytes of tensors on one accelerator so far; ``None`` without accelerators.
    """

    step: int
    loss: float
    tokens: int
    tokens_per_s: float
    lr: float
    grad_norm: float | None
    seconds: float
    process_bytes: int | None
    device_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class EvalRecord:
    """Metrics of one evaluation.

    Attributes:
        step: number of training steps before the evaluation.
        eval_loss: mean over the tokens of the held-out rows.
        eval_tokens: number of tokens of these rows.
        seconds: duration of the evaluation.
    """

    step: int
    eval_loss: float
    eval_tokens: int
    seconds: float


def record_of(logs: Mapping[str, float], step: int) -> StepRecord | EvalRecord | None:
    """Return the record of a Trainer's log entry; ``None`` if the entry is not about a step or an evaluation.

    >>> record_of({"eval_loss": 2.5, "eval_tokens": 64, "eval_runtime": 0.5}, 3)
    EvalRecord(step=3, eval_loss=2.5, eval_tokens=64, seconds=0.5)
    """
    if "eval_loss" in logs:
        return EvalRecord(step, logs["eval_loss"], int(logs["eval_tokens"]), logs["eval_runtime"])
    if "loss" not in logs:
        return None
    names = ("loss", "tokens", "tokens_per_s", "seconds", "process_bytes")
    known: dict[str, Any] = {name: logs[name] for name in names}
    known |= {name: logs.get(name) for name in ("grad_norm", "device_bytes")}
    return StepRecord(step=step, lr=logs["learning_rate"], **known)


def process_memory() -> int:
    """Return the bytes of memory that the process holds now (resident set size)."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def device_peak(devices: Iterable[Device]) -> int | None:
    """Return the highest peak of tensor bytes among the accelerators; ``None`` without accelerators.

    Virtual devices use memory of the process.
    """
    accelerators = [device.torch_device for device in devices if isinstance(device, AcceleratorDevice)]
    return max((torch.accelerator.max_memory_allocated(device) for device in accelerators), default=None)


class MetricsFile:
    """A JSON lines file to which one line is added after each step and each evaluation."""

    # path: path of the file; lines up to `step` are kept, later ones are overwritten
    # step: last step whose line is kept; a run that was killed can have written more lines than its checkpoint knows

    def __init__(self, path: str | os.PathLike[str], *, step: int = 0) -> None:
        self.path = pathlib.Path(path)
        write_text(self.path, "".join(_lines_up_to(self.path, step) if step else []))
        self._file: TextIO = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 # open as long as the object

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, record: StepRecord | EvalRecord) -> None:
        """Append a line."""
        values = {name: _finite(value) for name, value in dataclasses.asdict(record).items()}
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines_up_to(path: pathlib.Path, step: int) -> list[str]:
    if not path.is_file():
        return []
    lines = read_text(path, failure=FineTuneError).split("\n")[:-1]  # the last line is empty or incomplete
    return [f"{line}\n" for line in lines if _step_of(line) <= step]


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # not a record, so the line is dropped
