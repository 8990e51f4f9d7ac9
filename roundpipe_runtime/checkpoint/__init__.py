"""Save and load training checkpoints, also between different numbers of devices."""

from __future__ import annotations

from ..errors import CheckpointError, CheckpointWarning, DamagedCheckpointError
from .save_and_load import Checkpoint, list_checkpoints, load_checkpoint, save_checkpoint

__all__ = [
    "Checkpoint", "CheckpointError", "CheckpointWarning", "DamagedCheckpointError",
    "list_checkpoints", "load_checkpoint", "save_checkpoint",
]  # fmt: skip
