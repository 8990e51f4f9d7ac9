"""The documented names: the builder, runs of its model, and a stored case against a model file."""

import copy
import inspect
import os
import re
import sys

import numpy
import onnx
import onnxruntime
import pytest
import torch

from tests.flatten.storage.storage_values import State, same
from tests.models import make_model
from yobx_flatten import DamagedFileError, InvalidArgumentError, MissingDependencyError, ReplayError, StoredFileError
from yobx_flatten.declare import register_flattening_functions
from yobx_flatten.export import export_onnx
from yobx_flatten.huggingface import DecodeSizes, decode_inputs
from yobx_flatten.storage import (
    MiniOnnxBuilder,
    StoredCase,
    create_input_tensors_from_onnx_model,
    create_onnx_model_from_input_tensors,
    load_case,
    replay_case,
    save_case,
    save_nested,
)
from yobx_flatten.trees import dynamic_shapes

helper, T = onnx.helper, onnx.TensorProto


def model_file(path, inputs, outputs, nodes):
    infos = [
        [helper.make_tensor_value_info(name, code, shape) for name, code, shape in side] for side in (inputs, outputs)
    ]
    graph = helper.make_graph([helper.make_node(*node) for node in nodes], "g", *infos)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), path)
    return path


@pytest.fixture
def adder(tmp_path):
    x, y, total = [(name, T.FLOAT, ["n"]) for name in ("x", "y", "total")]
    return model_file(tmp_path / "adder.onnx", [x, y], [total], [("Add", ["x", "y"], ["total"])])


ONES = torch.ones(3)


def test_a_right_model_is_within_the_tolerance(adder, tmp_path):
    save_case(tmp_path / "case.onnx", {"y": 2 * ONES, "x": ONES}, {"total": 3 * ONES}, name="three")
    report = replay_case(load_case(tmp_path / "case.onnx"), adder)
    assert report.ok
    assert report.max_difference == 0.0
    assert [(output.name, output.output, output.difference) for output in report.outputs] == [("total", "total", 0.0)]
    assert str(report).startswith(f"three in {adder}: as expected")
    session = onnxruntime.InferenceSession(adder, providers=["CPUExecutionProvider"])
    assert replay_case(StoredCase((ONES, 2 * ONES), 3 * ONES), session).ok  # positional inputs go by order


def test_a_difference_is_reported_by_name_and_may_be_tolerated(adder):
    case = StoredCase({"x": ONES, "y": ONES}, {"total": torch.tensor([2.0, 2.5, 1.0])})
    assert replay_case(case, adder, tolerance=1.1).ok
    report = replay_case(case, adder)
    assert not report.ok
    assert report.max_difference == 1.0
    assert "NOT as expected" in str(report)
    assert "total  1.0e+00" in str(report)
    odd = torch.tensor([float("inf"), float("nan"), 1.0])
    assert replay_case(StoredCase({"x": odd, "y": ONES}, {"total": odd + 1}), adder).max_difference == 0.0
    assert replay_case(StoredCase({"x": ONES, "y": ONES}, {"total": odd + 1}), adder).max_difference == float("inf")


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"total": torch.ones(4)}, r"expected shape \(4,\), found \(3,\)"),
        ({"total": torch.full((3,), 2.0).double()}, r"expected torch\.float64, found torch\.float32"),
        ({"total": 2 * ONES, "more": ONES}, "more .*the model has no such output"),
    ],
)
def test_what_cannot_be_compared_is_an_error_of_its_output(adder, outputs, message):
    report = replay_case(StoredCase({"x": ONES, "y": ONES}, outputs), adder)
    assert report.max_difference == float("inf")
    assert re.search(message, str(report))


def test_numpy_arrays_none_and_inputs_that_are_not_taken(adder):
    inputs = {"x": numpy.ones(3, dtype="float32"), "y": ONES, "use_cache": True, "nothing": None}
    report = replay_case(StoredCase(inputs, {"total": 2 * ONES, "nothing": None}), adder)
    assert report.ok
    assert list(report.unused) == ["use_cache"]
    assert "the model takes no use_cache" in str(report)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"x": ONES}, r"takes y, which the test case does not contain\. .* case: x\. Inputs of the model: x, y"),
        ({"x": ONES, "y": ONES.double()}, "Input y must be float32, found float64"),
        ({"x": torch.ones(3, 1), "y": ONES}, r"onnxruntime fails on these inputs: .*x"),
    ],
)
def test_inputs_that_the_model_does_not_take_are_named(adder, inputs, said):
    with pytest.raises(ReplayError, match=said):
        replay_case(StoredCase(inputs, ONES), adder)


def test_a_file_that_is_no_model_and_a_path_in_the_place_of_the_case_are_refused(adder, tmp_path):
    (tmp_path / "x.onnx").write_text("no model")
    with pytest.raises(ReplayError, match=r"onnxruntime cannot load .*x\.onnx"):
        replay_case(StoredCase(1, 2), tmp_path / "x.onnx")
    with pytest.raises(FileNotFoundError, match=r"there is no file .*y\.onnx"):
        replay_case(StoredCase(1, 2), tmp_path / "y.onnx")
    with pytest.raises(InvalidArgumentError, match=r"\n    replay_case\(load_case\(path\), model\)"):
        replay_case("case.onnx", adder)


@pytest.mark.parametrize(
    ("code", "tensor"),
    [
        (T.BFLOAT16, torch.tensor([1.5, -2.0, float("inf")], dtype=torch.bfloat16)),
        (T.FLOAT8E5M2, torch.tensor([1.5, -2.0, 0.0]).to(torch.float8_e5m2)),
        (T.FLOAT8E4M3FN, torch.tensor([1.5, -2.0, 0.0]).to(torch.float8_e4m3fn)),
        (T.FLOAT16, torch.tensor([1.5], dtype=torch.float16)),
        (T.BOOL, torch.tensor([True, False])),
        (T.UINT64, torch.tensor([2**63 + 1, 0], dtype=torch.uint64)),
        (T.INT64, torch.zeros(0, dtype=torch.int64)),
        (T.BFLOAT16, torch.zeros(0, dtype=torch.bfloat16)),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_types_that_numpy_does_not_have_go_in_and_out(code, tensor, tmp_path):
    sides = [("x", code, ["n"])], [("y", code, ["n"])]
    model = model_file(tmp_path / "m.onnx", *sides, [("Identity", ["x"], ["y"])])
    assert replay_case(StoredCase({"x": tensor}, {"y": tensor}), model).max_difference == 0.0
    if tensor.numel() and code != T.BOOL:
        other = torch.zeros_like(tensor)
        assert replay_case(StoredCase({"x": tensor}, {"y": other}), model).max_difference > 0.0


@pytest.mark.parametrize(("code", "number"), [(T.FLOAT, 2), (T.INT64, 3), (T.BOOL, True), (T.STRING, "née")])
def test_a_number_of_python_takes_the_type_of_the_input(code, number, tmp_path):
    model = model_file(tmp_path / "m.onnx", [("x", code, [])], [("y", code, [])], [("Identity", ["x"], ["y"])])
    assert replay_case(StoredCase({"x": number}, {"y": number}), model).ok
    assert not replay_case(StoredCase({"x": number}, {"y": "other" if code == T.STRING else number - 1}), model).ok


@pytest.mark.slow
def test_a_decode_call_replays_in_the_file_of_export_onnx_and_in_that_of_torch(tmp_path):
    model = make_model("llama")
    example = decode_inputs(model, DecodeSizes(2, 5, 3))
    export_onnx(model, kwargs=example, path=tmp_path / "ours.onnx", cases=[], steps=1)
    with register_flattening_functions(patch_transformers=True):
        program = torch.export.export(model, (), example, dynamic_shapes=dynamic_shapes(example))
        torch.onnx.export(program, dynamo=True, verbose=False).save(tmp_path / "torchs.onnx")

    inputs = decode_inputs(model, DecodeSizes(3, 9, 1))
    with torch.no_grad():
        outputs = model(**copy.deepcopy(inputs))
    save_case(tmp_path / "case.onnx", inputs, outputs, name="past 9")
    case = load_case(tmp_path / "case.onnx")
    for name in ("ours.onnx", "torchs.onnx"):
        report = replay_case(case, tmp_path / name)
        assert report.ok, str(report)
        assert [output.name for output in report.outputs] == [
            "logits", "present.0.key", "present.0.value", "present.1.key", "present.1.value",
        ]  # fmt: skip
        with register_flattening_functions(patch_transformers=True):
            assert replay_case(case, tmp_path / name).ok
    other = StoredCase(case.inputs, {**case.outputs, "logits": case.outputs.logits + 1})
    assert not replay_case(other, tmp_path / "ours.onnx").ok


def run(model):
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, {}), strict=True))


def test_the_parameters_are_the_documented_ones():
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


def test_outputs_come_in_the_order_they_were_added_a_sequence_is_one_and_a_dict_is_two():
    tensor, state = torch.arange(1000.0), {"x": torch.ones(2), "y": torch.zeros(1)}
    builder = MiniOnnxBuilder(sep="___")
    builder.append_output_initializer("b", numpy.array([1, 2]))
    builder.append_output_initializer("a", torch.tensor([0.5], dtype=torch.float16))
    builder.append_output_sequence("rows", [numpy.array([1, 2]), numpy.array([[3]])])
    builder.append_output_dict("state", state)
    builder.append_output_sequence("all", [tensor, tensor])
    builder.append_output_initializer("one", tensor)
    with pytest.raises(InvalidArgumentError, match="an output has the name 'one' already"):
        builder.append_output_sequence("one", [torch.ones(1)])
    model = builder.to_onnx()
    found, back = run(model), create_input_tensors_from_onnx_model(model)
    assert list(found) == ["b", "a", "rows", "state___keys", "state___values", "all", "one"]
    assert found["b"].tolist() == [1, 2]
    assert found["a"].dtype == numpy.float16
    assert [row.tolist() for row in found["rows"]] == [row.tolist() for row in back["rows"]] == [[1, 2], [[3]]]
    assert found["state___keys"].tolist() == ["x", "y"]
    assert [value.tolist() for value in found["state___values"]] == [[1, 1], [0]]
    assert same(back["state"], state)
    assert found["one"].tolist() == found["all"][0].tolist() == found["all"][1].tolist() == tensor.tolist()
    assert sum(list(initializer.dims) == [1000] for initializer in model.graph.initializer) == 1


@pytest.mark.parametrize("tensors", [[], [1], [torch.ones(1), "x"], [[torch.ones(1)]]], ids=repr)
def test_a_sequence_needs_tensors(tensors):
    with pytest.raises(InvalidArgumentError, match="the output 'x' must consist of one or more tensors or arrays"):
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


def test_tensors_go_to_the_device_and_an_output_that_went_away_is_named():
    model = create_onnx_model_from_input_tensors([torch.ones(2), numpy.ones(2)])
    with pytest.raises(InvalidArgumentError, match="engine must be one of 'onnx', 'onnxruntime', 'ReferenceEvaluator'"):
        create_input_tensors_from_onnx_model(model, engine="magic")
    found = create_input_tensors_from_onnx_model(model, device="meta")
    assert found[0].device.type == "meta"
    assert found[1].tolist() == [1, 1]
    model = create_onnx_model_from_input_tensors({"x": torch.ones(1), "y": torch.ones(2)})
    del model.graph.output[1]
    with pytest.raises(DamagedFileError, match=r"lacks an output of its metadata: 'y' of shape \(2,\)"):
        create_input_tensors_from_onnx_model(model, engine="ReferenceEvaluator")


def test_without_onnxruntime_the_other_engines_work_and_the_message_says_what_to_install(adder, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    model = create_onnx_model_from_input_tensors([torch.ones(1)])
    assert create_input_tensors_from_onnx_model(model, engine="onnx")[0].tolist() == [1]
    assert create_input_tensors_from_onnx_model(model, engine="ReferenceEvaluator")[0].tolist() == [1]
    with pytest.raises(MissingDependencyError, match=r"onnxruntime, .*\n    pip install .*\[onnx\]'"):
        create_input_tensors_from_onnx_model(model, engine="onnxruntime")
    with pytest.raises(MissingDependencyError, match=r"replay_case needs onnxruntime, .*\n    pip install"):
        replay_case(StoredCase({"x": ONES, "y": ONES}, ONES), adder)


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
