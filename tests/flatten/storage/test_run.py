"""The outputs of a run as a source of leaves."""

import sys

import pytest
import torch

from yobx_flatten import (
    DamagedFileError,
    MissingDependencyError,
    create_input_tensors_from_onnx_model,
    create_onnx_model_from_input_tensors,
)

pytest.importorskip("onnx")


def test_without_onnxruntime_the_other_engines_work(monkeypatch):
    """Only who asks for it needs it."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    model = create_onnx_model_from_input_tensors([torch.ones(1)])
    assert create_input_tensors_from_onnx_model(model, engine="onnx")[0].tolist() == [1]
    assert create_input_tensors_from_onnx_model(model, engine="ReferenceEvaluator")[0].tolist() == [1]
    with pytest.raises(MissingDependencyError, match=r"onnxruntime, .*\n    pip install 'yobx-flatten\[onnx\]'"):
        create_input_tensors_from_onnx_model(model, engine="onnxruntime")


def test_an_output_that_went_away_is_named():
    model = create_onnx_model_from_input_tensors({"x": torch.ones(1), "y": torch.ones(2)})
    del model.graph.output[1]
    with pytest.raises(DamagedFileError, match=r"returns no 'y' of shape \(2,\)"):
        create_input_tensors_from_onnx_model(model, engine="ReferenceEvaluator")
