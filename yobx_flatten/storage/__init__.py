"""Store nested values in ONNX files, read the files, and compare the outputs of a model with stored outputs."""

from __future__ import annotations

from .builder import MiniOnnxBuilder, create_input_tensors_from_onnx_model, create_onnx_model_from_input_tensors
from .cases import CaseReport, OutputDifference, StoredCase, load_case, replay_case, save_case
from .nested import load_nested, save_nested

__all__ = [
    "CaseReport", "MiniOnnxBuilder", "OutputDifference", "StoredCase", "create_input_tensors_from_onnx_model",
    "create_onnx_model_from_input_tensors", "load_case", "load_nested", "replay_case", "save_case", "save_nested",
]  # fmt: skip
