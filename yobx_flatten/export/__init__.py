"""A program or an ONNX file, replayed next to the eager module before it is handed out."""

from __future__ import annotations

from .given_program import prove_program
from .onnx_export import export_onnx
from .program import ExportedModel, export_program
from .quality import Quality
from .quantization import Quantization
from .replay import Case, CaseResult
from .report import ExportReport

__all__ = [
    "Case",
    "CaseResult",
    "ExportReport",
    "ExportedModel",
    "Quality",
    "Quantization",
    "export_onnx",
    "export_program",
    "prove_program",
]
