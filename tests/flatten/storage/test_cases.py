"""Inputs and expected outputs in one file."""

import pytest
import torch

from tests.flatten.storage.storage_values import State, same
from yobx_flatten import StoredCase, load_case, save_case


@pytest.mark.parametrize("external", [False, True])
def test_a_case_comes_back(external, tmp_path):
    inputs, outputs = {"x": torch.ones(2), "state": State(1, None)}, (torch.zeros(3), [None])
    save_case(tmp_path / "case.onnx", inputs, outputs, name="two rows", external_data=external)
    case = load_case(tmp_path / "case.onnx")
    assert case.name == "two rows"
    assert same(case.inputs, inputs)
    assert same(case.outputs, outputs)


def test_what_goes_in_and_comes_out_is_stored_once(tmp_path):
    mask = torch.ones(1000)
    assert save_case(tmp_path / "case.onnx", {"mask": mask}, {"mask": mask}) < 6000
    case = load_case(tmp_path / "case.onnx")
    assert case.inputs["mask"] is case.outputs["mask"]


def test_the_graph_returns_inputs_and_outputs(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    save_case(tmp_path / "case.onnx", {"x": torch.ones(2)}, torch.zeros(3), name="n")
    session = runtime.InferenceSession(tmp_path / "case.onnx")
    assert [output.name for output in session.get_outputs()] == ["inputs.x", "outputs", "name"]


def test_a_case_is_data():
    assert StoredCase(1, 2) == StoredCase(inputs=1, outputs=2, name="")
