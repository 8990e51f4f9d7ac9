"""Exceptions and warnings of this package. Each message names the place, what was found there, and the line to type."""

from __future__ import annotations

import os
import sys
import types
import warnings

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "ConfigError",
    "DamagedCheckpointError",
    "DeviceError",
    "DeviceMemoryError",
    "DistributedError",
    "JoinError",
    "LossError",
    "PlanError",
    "RoundPipeError",
    "RoundPipeWarning",
    "SplitError",
    "StageError",
    "UnevenSplitWarning",
    "UnregisteredObjectError",
    "UseAfterReleaseError",
    "call_site",
    "warn",
]


class RoundPipeError(Exception):
    """Base class of the errors of this package."""


class ConfigError(RoundPipeError, ValueError):
    """A field of a run configuration, or an argument, has a value that it cannot have."""


class SplitError(RoundPipeError, ValueError):
    """Inputs or labels cannot be split into microbatches, or it is not clear where."""


class UnregisteredObjectError(SplitError, TypeError):
    """An object holds tensors, but no flattening function is registered for its class."""


class JoinError(RoundPipeError, ValueError):
    """The outputs of the microbatches cannot be joined."""


class LossError(RoundPipeError, ValueError):
    """A loss function returned something that is not a loss."""


class PlanError(RoundPipeError, ValueError):
    """An execution plan misses, repeats or reorders a layer."""


class DeviceError(RoundPipeError, RuntimeError):
    """A device was asked for something that it does not have or cannot do."""


class UseAfterReleaseError(DeviceError):
    """Memory of a device was read after it was released, on another device, or before it was written."""


class DeviceMemoryError(DeviceError, MemoryError):
    """A device is out of memory."""


class DistributedError(RoundPipeError, RuntimeError):
    """Ranks do not agree, one of them failed, or one of them is gone. What was collected is dropped on all of them."""


class StageError(RoundPipeError, RuntimeError):
    """A stage could not be run. Exceptions of a layer or a loss are raised unchanged; this is for everything else."""


class RoundPipeWarning(UserWarning):
    """Base class of the warnings of this package."""


class UnevenSplitWarning(RoundPipeWarning):
    """Microbatches have different sizes, and a loss that is divided by their number is not the mean of the batch."""


_INSIDE = ("roundpipe_runtime", "torch")


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line of the user's call: the first one that is neither in this package nor in torch."""
    warnings.warn(message, category, stacklevel=_of_caller()[0])


def call_site() -> str:
    """Return ``"file:line"`` of the user's call: the first line that is neither in this package nor in torch."""
    frame = _of_caller()[1]
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _of_caller() -> tuple[int, types.FrameType]:
    """The frame of the user's call, and its number as seen by the function that asks."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    return level, frame


class CheckpointError(RoundPipeError, ValueError):
    """A state cannot be stored, or a checkpoint does not fit the objects that it is loaded into."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete, or its files differ from those that were written."""


class CheckpointWarning(RoundPipeWarning):
    """A damaged checkpoint was skipped, or a part of a checkpoint was not requested."""
