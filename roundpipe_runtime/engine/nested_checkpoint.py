"""Activation checkpointing inside a layer or a loss (``torch.utils.checkpoint``): backward calls forward code again.

It puts the generator of the CPU, which all threads share, into the state from before its forward, calls the part again,
and puts it back. In between, no other thread may draw.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch

from .layer_traits import traits_of
from .recompute import generator_alone

__all__ = ["run_backward"]

T = TypeVar("T")


def run_backward(call: Callable[[], T], code: Any, device: torch.device) -> T:
    """Return ``call()``; one that calls forward code again has the generator of the CPU for itself.

    Which these are is seen at the first call. One that begins with checkpoints later is not noticed. A thread that has
    a profiler keeps it, and has the generator for every backward.

    Args:
        call: goes backward through a layer, or a loss.
        code: the layer or the loss function.
        device: where it runs. An accelerator draws from a generator of its own, and has one thread.

    Returns:
        The result of the call.
    """
    if device.type != "cpu":
        return call()
    traits = traits_of(code)
    if traits.reenters is False:
        return call()
    with generator_alone():
        if traits.reenters or sys.getprofile() is not None:
            return call()
        with _watched() as seen:
            result = call()
        if seen.all or seen.names:
            traits.reenters = bool(seen.names)
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
