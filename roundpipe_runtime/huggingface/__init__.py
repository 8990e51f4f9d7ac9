"""Models of transformers as pipelines: cut them, prove the cut, train them."""

from __future__ import annotations

from .chunked_loss import chunked_cross_entropy
from .cut import Cut, cut
from .errors import BatchStructureError, CutError, CutRefusedWarning
from .report import CutReport, Equivalence
from .wrap import WrappedModel, wrap_model_to_roundpipe

__all__ = [
    "BatchStructureError",
    "Cut",
    "CutError",
    "CutRefusedWarning",
    "CutReport",
    "Equivalence",
    "WrappedModel",
    "chunked_cross_entropy",
    "cut",
    "wrap_model_to_roundpipe",
]
