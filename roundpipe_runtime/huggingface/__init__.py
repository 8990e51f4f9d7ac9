"""Models of transformers as pipelines: cut them, prove the cut, train them."""

from __future__ import annotations

from .chunked_loss import chunked_cross_entropy
from .cut import Cut, cut
from .errors import BatchStructureError, CutError, CutRefusedWarning
from .passed import PassedTensor, passed_tensors
from .report import CutReport, Equivalence
from .smoothing import SmoothedLoss
from .wrap import WrappedModel, wrap_model_to_roundpipe

__all__ = [
    "BatchStructureError",
    "Cut",
    "CutError",
    "CutRefusedWarning",
    "CutReport",
    "Equivalence",
    "PassedTensor",
    "SmoothedLoss",
    "WrappedModel",
    "chunked_cross_entropy",
    "cut",
    "passed_tensors",
    "wrap_model_to_roundpipe",
]
