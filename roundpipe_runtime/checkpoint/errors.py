"""Errors and warnings of checkpoints."""

from __future__ import annotations

from ..errors import RoundPipeError, RoundPipeWarning


class CheckpointError(RoundPipeError, ValueError):
    """A state cannot be stored, or a checkpoint does not fit the objects that it is loaded into."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete, or its files differ from those that were written."""


class CheckpointWarning(RoundPipeWarning):
    """A damaged checkpoint was skipped, or a part of a checkpoint was not requested."""
