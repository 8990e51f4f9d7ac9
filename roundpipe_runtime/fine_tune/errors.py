"""Errors of fine-tuning on text."""

from __future__ import annotations

from ..errors import RoundPipeError


class FineTuneError(RoundPipeError, ValueError):
    """A model, text, tokenizer or folder is not usable for the training, or a training cannot continue."""
