"""Export a module to a program or an ONNX file, and replay it next to the eager module."""

from __future__ import annotations

from .exported_model import ExportedModel
from .foreign_program import prove_program
from .onnx_export import export_onnx
from .program_export import export_program
from .proof.case import Case
from .proof.quality import Quality
from .proof.replay import CaseResult
from .proof.report import ExportReport
from .quantization.options import Quantization

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
