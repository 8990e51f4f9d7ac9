"""Pipelines for transformers models: split a model into modules, verify the split, and train the model."""

from __future__ import annotations

from ..errors import BatchStructureError, CutError, CutRefusedWarning
from .cutting.check import CutReport, Equivalence
from .cutting.cut import Cut, PassedTensor, cut, passed_tensors
from .long_rows import LongRows
from .loss.call_options import SmoothedLoss
from .loss.sliced import chunked_cross_entropy
from .quantize import quantize_frozen
from .wrap import WrappedModel, wrap_model_to_roundpipe

__all__ = [
    "BatchStructureError", "Cut", "CutError", "CutRefusedWarning", "CutReport", "Equivalence", "LongRows",
    "PassedTensor", "SmoothedLoss", "WrappedModel", "chunked_cross_entropy", "cut", "passed_tensors",
    "quantize_frozen", "wrap_model_to_roundpipe",
]  # fmt: skip
