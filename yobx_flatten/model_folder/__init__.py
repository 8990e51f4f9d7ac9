"""Export a model to a folder with exported files, configuration, tokenizer and test cases."""

from __future__ import annotations

from .folder_and_model import AddedAdapter, FolderExplanation, add_adapter, explain_folder
from .manifest import FolderManifest
from .open_folder import (
    OnnxForAudioClassification,
    OnnxForCausalLM,
    OnnxForCTC,
    OnnxForDepthEstimation,
    OnnxForFeatureExtraction,
    OnnxForImageClassification,
    OnnxForImageSegmentation,
    OnnxForImageTextToText,
    OnnxForMaskedLM,
    OnnxForMultipleChoice,
    OnnxForObjectDetection,
    OnnxForQuestionAnswering,
    OnnxForSeq2SeqLM,
    OnnxForSequenceClassification,
    OnnxForSpeechSeq2Seq,
    OnnxForTextToSpectrogram,
    OnnxForTokenClassification,
    OnnxForVideoClassification,
    OnnxForVocoder,
    OnnxForZeroShotImageClassification,
    open_generator,
    open_model,
)
from .verify import FolderCheck, FolderReport, verify_folder
from .write import ExportedFolder, export_folder

__all__ = [
    "AddedAdapter", "ExportedFolder", "FolderCheck", "FolderExplanation", "FolderManifest", "FolderReport",
    "OnnxForAudioClassification", "OnnxForCTC", "OnnxForCausalLM", "OnnxForDepthEstimation",
    "OnnxForFeatureExtraction", "OnnxForImageClassification", "OnnxForImageSegmentation", "OnnxForImageTextToText",
    "OnnxForMaskedLM", "OnnxForMultipleChoice", "OnnxForObjectDetection", "OnnxForQuestionAnswering",
    "OnnxForSeq2SeqLM", "OnnxForSequenceClassification", "OnnxForSpeechSeq2Seq", "OnnxForTextToSpectrogram",
    "OnnxForTokenClassification", "OnnxForVideoClassification", "OnnxForVocoder",
    "OnnxForZeroShotImageClassification", "add_adapter", "explain_folder", "export_folder", "open_generator",
    "open_model", "verify_folder",
]  # fmt: skip
