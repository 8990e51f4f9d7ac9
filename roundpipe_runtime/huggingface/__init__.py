"""Models of transformers as pipelines: cut them, prove the cut, train them."""

from __future__ import annotations

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
    "cut",
    "wrap_model_to_roundpipe",
]
