"""Checkpoints: save a training, and go on with it, on other devices too."""

from __future__ import annotations

from .errors import CheckpointError, CheckpointWarning, DamagedCheckpointError
from .load import load_checkpoint
from .save import Checkpoint, list_checkpoints, save_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointWarning",
    "DamagedCheckpointError",
    "list_checkpoints",
    "load_checkpoint",
    "save_checkpoint",
]
