"""What can be wrong with a request to train on text."""

from __future__ import annotations

from ..errors import RoundPipeError

__all__ = ["FineTuneError"]


class FineTuneError(RoundPipeError, ValueError):
    """A model, a text, a tokenizer or a folder is not what a training needs, or a training cannot go on."""
