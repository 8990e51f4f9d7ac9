"""What can be wrong with a checkpoint."""

from __future__ import annotations

from ..errors import RoundPipeError, RoundPipeWarning

__all__ = ["CheckpointError", "CheckpointWarning", "DamagedCheckpointError"]


class CheckpointError(RoundPipeError, ValueError):
    """A state cannot be stored, or a checkpoint is of something else than what it is loaded into."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete, or its files are not what was written."""


class CheckpointWarning(RoundPipeWarning):
    """A checkpoint was passed over because it is damaged, or a part of it was not asked for."""
