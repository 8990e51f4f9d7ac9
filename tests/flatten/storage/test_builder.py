"""The documented names: the builder, the two functions between nested inputs and a model, and runs of the model."""

import inspect
import os
import sys

import numpy
import onnx
import pytest
import torch

from tests.flatten.storage.storage_values import State, same
from yobx_flatten import (
    DamagedFileError,
    InvalidArgumentError,
    MiniOnnxBuilder,
    MissingDependencyError,
    create_input_tensors_from_onnx_model,
    create_onnx_model_from_input_tensors,
    save_nested,
)
from yobx_flatten.errors import StoredFileError


def run(model):
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, {}), strict=True))


def test_the_parameters_are_the_documented_ones():
    """Code that was written for onnx-diagnostic passes them by position and by name."""
    expected = {
        MiniOnnxBuilder: ["target_opset", "ir_version", "sep"],
        MiniOnnxBuilder.append_output_initializer: ["self", "name", "tensor", "randomize"],
        MiniOnnxBuilder.append_output_sequence: ["self", "name", "tensors"],
        MiniOnnxBuilder.append_output_dict: ["self", "name", "tensors"],
        MiniOnnxBuilder.to_onnx: ["self"],
        create_onnx_model_from_input_tensors: ["inputs", "switch_low_high", "randomize", "sep"],
        create_input_tensors_from_onnx_model: ["proto", "device", "engine", "sep"],
    }
    assert {f: list(inspect.signature(f).parameters) for f in expected} == expected


def test_outputs_come_in_the_order_they_were_added():
    builder = MiniOnnxBuilder()
    builder.append_output_initializer("b", numpy.array([1, 2]))
    builder.append_output_initializer("a", torch.tensor([0.5], dtype=torch.float16))
    found = run(builder.to_onnx())
    assert list(found) == ["b", "a"]
    assert found["b"].tolist() == [1, 2]
    assert found["a"].dtype == numpy.float16


def test_a_sequence_is_one_output():
    builder = MiniOnnxBuilder()
    builder.append_output_sequence("rows", [numpy.array([1, 2]), numpy.array([[3]])])
    model = builder.to_onnx()
    assert [row.tolist() for row in run(model)["rows"]] == [[1, 2], [[3]]]
    assert [row.tolist() for row in create_input_tensors_from_onnx_model(model)["rows"]] == [[1, 2], [[3]]]


def test_a_dict_is_two_outputs():
    builder = MiniOnnxBuilder(sep="___")
    builder.append_output_dict("state", {"x": torch.ones(2), "y": torch.zeros(1)})
    model = builder.to_onnx()
    found = run(model)
    assert found["state___keys"].tolist() == ["x", "y"]
    assert [value.tolist() for value in found["state___values"]] == [[1, 1], [0]]
    assert same(create_input_tensors_from_onnx_model(model), {"state": {"x": torch.ones(2), "y": torch.zeros(1)}})


def test_one_tensor_may_be_in_several_outputs():
    tensor = torch.arange(1000.0)
    builder = MiniOnnxBuilder()
    builder.append_output_sequence("all", [tensor, tensor])
    builder.append_output_initializer("one", tensor)
    model = builder.to_onnx()
    found = run(model)
    assert found["one"].tolist() == found["all"][0].tolist() == found["all"][1].tolist() == tensor.tolist()
    assert len(model.graph.initializer) == 1


def test_a_name_is_taken_once():
    builder = MiniOnnxBuilder()
    builder.append_output_initializer("x", torch.ones(1))
    with pytest.raises(InvalidArgumentError, match="'x' is the name of an output already"):
        builder.append_output_sequence("x", [torch.ones(1)])


@pytest.mark.parametrize("tensors", [[], [1], [torch.ones(1), "x"], [[torch.ones(1)]]], ids=repr)
def test_a_sequence_needs_tensors(tensors):
    with pytest.raises(InvalidArgumentError, match="'x' needs at least one tensor or array"):
        MiniOnnxBuilder().append_output_sequence("x", tensors)


def test_the_opset_is_the_one_asked_for_unless_a_type_needs_a_newer_one():
    def opset(tensor, **options):
        builder = MiniOnnxBuilder(**options)
        builder.append_output_initializer("x", tensor)
        return builder.to_onnx().opset_import[0].version

    assert opset(torch.ones(1)) == 18
    assert opset(torch.ones(1), target_opset=21) == 21
    assert opset(torch.ones(1).to(torch.float8_e5m2)) == 19


@pytest.mark.parametrize("engine", ["onnx", "onnxruntime", "ReferenceEvaluator", "ExtendedReferenceEvaluator"])
def test_every_engine_gives_the_same(engine):
    if engine == "onnxruntime":
        pytest.importorskip("onnxruntime")
    values = {
        "state": State(torch.ones(2, dtype=torch.bfloat16), [None, 1, 0.1, True, 1j, "née", b"ab"]),
        "more": [torch.arange(3.0).to(torch.float8_e5m2), torch.tensor([1 + 2j]), numpy.array(["a", "b"]), 2**63 - 1],
        "empty": torch.zeros(0, 3, dtype=torch.uint16),
    }
    model = create_onnx_model_from_input_tensors(values)
    assert same(create_input_tensors_from_onnx_model(model, engine=engine), values)


@pytest.mark.parametrize("engine", ["onnxruntime", "ReferenceEvaluator"])
def test_an_engine_reads_sequences_and_dicts(engine, tmp_path):
    if engine == "onnxruntime":
        pytest.importorskip("onnxruntime")
    builder = MiniOnnxBuilder(sep="/")
    builder.append_output_dict("state", {"x": torch.ones(2), "y": torch.zeros(1)})
    builder.append_output_sequence("rows", [torch.ones(1)])
    onnx.save(builder.to_onnx(), tmp_path / "x.onnx")
    found = create_input_tensors_from_onnx_model(str(tmp_path / "x.onnx"), engine=engine, sep="/")
    assert same(found, {"state": {"x": torch.ones(2), "y": torch.zeros(1)}, "rows": [torch.ones(1)]})


def test_an_unknown_engine_is_refused():
    with pytest.raises(InvalidArgumentError, match="engine must be one of 'onnx', 'onnxruntime', 'ReferenceEvaluator'"):
        create_input_tensors_from_onnx_model(create_onnx_model_from_input_tensors(1), engine="magic")


def test_random_numbers_take_the_place_of_floats():
    values = {"big": torch.ones(100, 100), "small": torch.ones(2, dtype=torch.bfloat16), "ids": torch.arange(3)}
    model = create_onnx_model_from_input_tensors(values, randomize=True)
    assert model.ByteSize() < 2000
    found, again = (create_input_tensors_from_onnx_model(model) for _ in range(2))
    assert same(found, again)
    assert found["ids"].tolist() == [0, 1, 2]
    assert (found["big"].shape, found["small"].dtype) == (torch.Size([100, 100]), torch.bfloat16)
    assert 0.4 < found["big"].mean() < 0.6
    assert run(model)["big"].shape == (100, 100)


def test_tensors_go_to_the_device():
    model = create_onnx_model_from_input_tensors([torch.ones(2), numpy.ones(2)])
    found = create_input_tensors_from_onnx_model(model, device="meta")
    assert found[0].device.type == "meta"
    assert found[1].tolist() == [1, 1]


def test_without_onnxruntime_the_other_engines_work(monkeypatch):
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
