"""The outputs of a run as a source of leaves."""

import os
import sys

import onnx
import pytest
import torch

from yobx_flatten import (
    DamagedFileError,
    MissingDependencyError,
    create_input_tensors_from_onnx_model,
    create_onnx_model_from_input_tensors,
    save_nested,
)
from yobx_flatten.errors import StoredFileError


def test_without_onnxruntime_the_other_engines_work(monkeypatch):
    """Only who asks for it needs it."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    model = create_onnx_model_from_input_tensors([torch.ones(1)])
    assert create_input_tensors_from_onnx_model(model, engine="onnx")[0].tolist() == [1]
    assert create_input_tensors_from_onnx_model(model, engine="ReferenceEvaluator")[0].tolist() == [1]
    with pytest.raises(MissingDependencyError, match=r"onnxruntime, .*\n    pip install .*\[onnx\]'"):
        create_input_tensors_from_onnx_model(model, engine="onnxruntime")


def test_an_output_that_went_away_is_named():
    model = create_onnx_model_from_input_tensors({"x": torch.ones(1), "y": torch.ones(2)})
    del model.graph.output[1]
    with pytest.raises(DamagedFileError, match=r"has no output 'y' of shape \(2,\)"):
        create_input_tensors_from_onnx_model(model, engine="ReferenceEvaluator")


@pytest.mark.skipif(os.name != "posix", reason="pipes")
@pytest.mark.parametrize("engine", ["onnx", "onnxruntime", "ReferenceEvaluator"])
@pytest.mark.parametrize("place", ["/etc/passwd", "../secret", "pipe"])
def test_data_that_are_elsewhere_are_not_read(tmp_path, engine, place):
    """By whichever engine, and nothing is waited for."""
    path = tmp_path / "inner" / "values.onnx"
    save_nested(path, {"x": torch.rand(4000)}, external_data=True)
    (tmp_path / "secret").write_bytes(bytes(16_000))
    os.mkfifo(tmp_path / "inner" / "pipe")
    model = onnx.load(path, load_external_data=False)
    for entry in (entry for tensor in model.graph.initializer for entry in tensor.external_data):
        if entry.key == "location":
            entry.value = place
    onnx.save(model, path)
    with pytest.raises(StoredFileError):
        create_input_tensors_from_onnx_model(path, engine=engine)
