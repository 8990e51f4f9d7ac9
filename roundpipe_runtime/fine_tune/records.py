"""What is known of a step and of an evaluation, and the file of JSON lines that keeps it.

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
from types import TracebackType
from typing import Any, TextIO

__all__ = ["EvalRecord", "MetricsFile", "StepRecord"]


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """A step.

    Attributes:
        step: its number, from 1 on.
        loss: the mean over the tokens of the step, before it.
        tokens: of the step.
        tokens_per_s: of this step, copies and optimizer included.
        lr: learning rate.
        grad_norm: of all gradients, before they were clipped.
        seconds: that it took.
        process_bytes: memory of the process, after it.
        device_bytes: the most that tensors had on one accelerator so far; ``None`` without one.
    """

    step: int
    loss: float
    tokens: int
    tokens_per_s: float
    lr: float
    grad_norm: float
    seconds: float
    process_bytes: int | None
    device_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class EvalRecord:
    """An evaluation.

    Attributes:
        step: steps done before it.
        eval_loss: the mean over the tokens of the rows that were held out.
        eval_tokens: of these rows.
        seconds: that it took.
    """

    step: int
    eval_loss: float
    eval_tokens: int
    seconds: float


class MetricsFile:
    """A file with a line for each step and each evaluation, complete at any time.

    Args:
        path: the file; what is there is kept up to ``step`` and written over after it.
        step: the last step whose line stays; a run that was killed has written more than its checkpoint knows.
    """

    def __init__(self, path: str | os.PathLike[str], *, step: int = 0) -> None:
        self.path = pathlib.Path(path)
        kept = _lines_up_to(self.path, step) if step else []
        self._file: TextIO = open(self.path, "w", encoding="utf-8")  # noqa: SIM115 # open as long as the object
        self._file.writelines(kept)
        self._file.flush()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, record: StepRecord | EvalRecord) -> None:
        """Add a line."""
        values = {name: _finite(value) for name, value in dataclasses.asdict(record).items()}
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines_up_to(path: pathlib.Path, step: int) -> list[str]:
    if not path.is_file():
        return []
    with open(path, encoding="utf-8") as file:
        return [line for line in file if line.endswith("\n") and _step_of(line) <= step]


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # of something else: it is in the way
