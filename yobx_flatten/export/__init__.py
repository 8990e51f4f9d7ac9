"""Export a module to a program or an ONNX file, and compare the result with the eager module on test inputs."""

from __future__ import annotations

from .calls import export_onnx, export_program, prove_program
from .exported_model import ExportedModel
from .proof.eager_runs import Case
from .proof.quality import Quality
from .proof.replay import CaseResult
from .proof.report import ExportReport
from .quantization import Quantization

__all__ = [
    "Case", "CaseResult", "ExportReport", "ExportedModel", "Quality", "Quantization", "export_onnx", "export_program",
    "prove_program",
]  # fmt: skip
