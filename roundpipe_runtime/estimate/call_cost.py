"""Measure the interpreter's cost of calling a layer."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from ..engine.config import RoundPipeRunConfig
from ..pipeline import RoundPipe
from ..schedule.plan import ModelExecutePlan

_LAYERS, _MICROBATCHES, _WIDTH = 16, 4, 8
_REPEATS = 5


def call_seconds() -> float:
    """Return the seconds of the host for a layer and microbatch of a step, beyond those of the layer itself.

    A pipeline of small layers is timed on one virtual device, next to the layers alone, in a fraction of a second.
    """
    layers = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)])
    inputs = torch.ones(_MICROBATCHES, _WIDTH)
    last = _LAYERS - 4
    plan = ModelExecutePlan([range(last)], [range(first, first + 4) for first in range(last, -1, -4)])
    config = RoundPipeRunConfig(num_microbatch=_MICROBATCHES, loss_reduction="mean", execute_plan=plan)

    def alone() -> None:
        for row in inputs.split(1):
            with torch.no_grad():
                layers(row)
            layers(row).square().mean().backward()

    pipe = RoundPipe(layers, devices="virtual:1", model_run_config=config)

    def pipeline() -> None:
        pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().mean())
        pipe.zero_grad()

    try:
        beyond = _least(pipeline) - _least(alone)
    finally:
        pipe.close()
    return max(0.0, beyond) / (_LAYERS * _MICROBATCHES)


def _least(work: Callable[[], None]) -> float:
    found = []
    for _ in range(_REPEATS + 1):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found[1:])
