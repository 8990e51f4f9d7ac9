"""Activation checkpointing inside a layer or a loss (``torch.utils.checkpoint``): backward calls forward code again.

It puts the generator of the CPU, which all threads share, into the state from before its forward, calls the part again,
and puts it back, on any device. In between, no other thread may draw.

Which layers do so is seen once, by a profiler: on the CPU in the first backward. That of an accelerator runs in a
thread of autograd's, which no profiler of ours reaches, so there it is seen in the first forward.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch

from ...device.generator import generator_alone
from ..recompute.generators import traits_of

T = TypeVar("T")


def run_backward(call: Callable[[], T], code: Any, device: torch.device) -> T:
    """Return ``call()``; the CPU's random generator is locked if the call repeats forward code.

    Which these are is seen at the first call. One that begins with checkpoints later is not noticed. A thread that has
    a profiler keeps it, and has the generator for every backward.
    """
    if traits_of(code).reenters.get(_mode(code)) is False:
        return call()
    with generator_alone():
        return _watch(call, code) if device.type == "cpu" else call()


def watch_forward(call: Callable[[], T], code: Any, device: torch.device) -> T:
    """Return ``call()``, and note at the first call on an accelerator whether its backward will call it again."""
    return call() if device.type == "cpu" or not torch.is_grad_enabled() else _watch(call, code)


def _mode(code: Any) -> bool:
    """Whether a layer is in training: models call parts again in this mode only."""
    return bool(getattr(code, "training", True))


def _watch(call: Callable[[], T], code: Any) -> T:
    """Return ``call()``; note whether code of torch's checkpoints ran in it, unless that is known."""
    reenters, mode = traits_of(code).reenters, _mode(code)
    if mode in reenters or sys.getprofile() is not None:
        return call()
    with _watched() as seen:
        result = call()
    if seen.all or seen.names:
        reenters[mode] = bool(seen.names)
    return result


@dataclasses.dataclass
class _CheckpointCalls:
    """Functions of torch's checkpoints that ran in a thread; and whether these are all, as there was no profiler."""

    names: list[str] = dataclasses.field(default_factory=list)
    all: bool = True


@contextmanager
def _watched() -> Iterator[_CheckpointCalls]:
    """Note in the block which code of torch's checkpoints runs in this thread, which has no profiler."""
    checkpoint = sys.modules.get("torch.utils.checkpoint")
    file = getattr(checkpoint, "__file__", None)
    seen = _CheckpointCalls()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename == file:
            seen.names.append(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        yield seen
    finally:
        seen.all = sys.getprofile() is look
        if seen.all:  # a profiler that was started meanwhile stays
            sys.setprofile(None)
