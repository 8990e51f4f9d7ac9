"""Planted faults of a folder are found, and the first node that differs is named with its line."""

import json
import shutil

import numpy
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.fx.config
from onnx import numpy_helper

from tests.accelerator.planted import FAULTS
from tests.cases import cases
from yobx_flatten import FlattenError, InvalidArgumentError, explain_folder, export_folder, load_case
from yobx_flatten.__main__ import main
from yobx_flatten.export.onnx import attempts
from yobx_flatten.export.onnx import file as onnx_file
from yobx_flatten.export.onnx.attempts import ATTENTION_OPSET
from yobx_flatten.model_folder.source.configuration import small_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[None, "onnxruntime"])
def made(request, tmp_path_factory):
    model, root = small_model("llama"), tmp_path_factory.mktemp("explained")
    model.save_pretrained(root / "saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.fx.config, "do_not_emit_stack_traces", False)  # as it is outside of these tests
        export_folder(root / "saved", root / "out", optimize=request.param)
    return model, root / "saved", root / "out"


def _changed(folder, place, change, name="model.onnx"):
    copied = shutil.copytree(folder, place)
    model = onnx.load(copied / name)
    found = change(model.graph)
    onnx.save(model, copied / name)
    return copied, found


def _add_to_weight(of_product):

    def change(graph):
        held = {one.name: one for one in graph.initializer}
        products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm") and node.input[1] in held]
        node = products[of_product]
        weight = held[node.input[1]]
        array = numpy_helper.to_array(weight).copy()
        before = float(array[3, 5])
        array[3, 5] += 0.5
        weight.CopyFrom(numpy_helper.from_array(array, weight.name))
        return node.name, weight.name, f"[3, 5] is {float(array[3, 5]):.6g}, and {before:.6g} in the model"

    return change


def test_a_folder_has_no_node_that_differs_and_another_model_differs_at_its_first_weight(made):
    model, _, folder = made
    explained = explain_folder(folder, model)
    assert explained
    assert len(explained.files) == 4
    values = {one.values for one in explained.files.values()}
    assert len(values) == 1
    assert values.pop() > 40
    assert "none of" in str(explained)
    other = small_model("llama")
    with torch.no_grad():
        other.model.embed_tokens.weight[7:] += 1.0
    assert _first(folder, other).operator == "Gather"


def _first(folder, model):
    return next(one.first for one in explain_folder(folder, model).files.values() if one.first is not None)


@pytest.mark.parametrize("of_product", [0, -1])
def test_a_weight_that_was_altered_is_named_with_its_layer_and_its_line(of_product, made, tmp_path):
    """With the value of the model there; the last product is that of the head, whose values are the case's logits."""
    model, _, folder = made
    copied, (node, weight, numbers) = _changed(folder, tmp_path / "out", _add_to_weight(of_product))
    first = _first(copied, model)
    assert (first.node, first.operator) == (node, "MatMul")
    assert first.index[-1] == 5  # the column of the number
    assert float(first.found) != float(first.expected)
    (cause,) = first.causes
    assert f"its weight {weight} differs from the model's in 1 of " in cause
    assert numbers in cause
    assert "modeling_llama.py, line" in first.source
    assert first.others == ()
    if of_product == -1:
        assert "lm_head, modeling_llama.py" in first.source
        name = json.loads((folder / "yobx_flatten.json").read_text())["cases"]["model.onnx"][0]
        wanted = load_case(folder / name).outputs["logits"]
        assert abs(float(first.expected) - float(wanted[first.index])) < 1e-4


def _sum_for_product(graph):
    node = [one for one in graph.node if one.op_type == "Mul"][-1]
    node.op_type = "Add"
    return node, "its operator is Add; in the model it is Mul."


def _other_epsilon(graph):
    node = next(one for one in graph.node if one.op_type == "RMSNormalization")
    next(one for one in node.attribute if one.name == "epsilon").f = 0.1
    return node, "its attribute epsilon differs from the model's."


@pytest.mark.parametrize("change", [_sum_for_product, _other_epsilon])
def test_an_operator_or_an_attribute_that_was_changed_is_named(change, made, tmp_path):
    _, saved, folder = made
    copied, (node, cause) = _changed(folder, tmp_path / "out", change)
    first = _first(copied, str(saved))
    assert (first.node, first.operator) == (node.name, node.op_type)
    assert first.causes == (cause,)


def test_the_command_line_explains(made, tmp_path, capsys):
    _, saved, folder = made
    assert main(["verify", str(folder), "--explain", str(saved)]) == 0
    assert "values differs from the model's" in capsys.readouterr().out
    copied, (node, weight, _) = _changed(folder, tmp_path / "out", _add_to_weight(-1))
    assert main(["verify", str(copied), "--explain", str(saved), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    first = next(row["first"] for row in shown["explained"] if row["first"])
    assert first["node"] == node
    assert weight in first["causes"][0]


KINDS = ["t5", "gpt2", "gemma3_text", "whisper", "mamba", "qwen2_vl"]  # T5 has three files


@pytest.mark.parametrize("kind", cases(KINDS, quick=["t5"]))
def test_other_kinds_of_models_are_explained(kind, tmp_path):
    model = small_model(kind)
    done = export_folder(model, tmp_path / "out", optimize="onnxruntime" if kind == "gpt2" else None)
    assert explain_folder(tmp_path / "out", model)
    *_, last = done.reports
    copied, (node, _, _) = _changed(tmp_path / "out", tmp_path / "copied", _add_to_weight(-1), last)
    found = {name: one.first for (name, _), one in explain_folder(copied, model).files.items() if one.first is not None}
    assert {name: first.node for name, first in found.items()} == {last: node}


def test_weights_in_a_second_file_room_for_adapters_and_half_precision_are_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_file, "LARGE", 1)
    model = small_model("llama").to(torch.float16)
    export_folder(model, tmp_path / "out", adapters={})
    assert (tmp_path / "out/model.onnx.data").is_file()
    explained = explain_folder(tmp_path / "out", model)
    assert explained
    assert min(one.values for one in explained.files.values()) > 120


def test_what_is_not_compared_node_by_node_is_refused(tmp_path):
    """Quantised weights are others in every node; programs have no nodes of onnxruntime."""
    llama, t5 = small_model("llama"), small_model("t5")
    for number, (how, compared, words) in enumerate(
        [
            ({"quantize": "int8"}, llama, r"is quantized, but only ONNX files(.|\n)*without quantize="),
            ({"to": "program"}, llama, "is for torch, but only ONNX files"),
            ({"proof": "none"}, llama, 'contains no test cases: export again without proof="none"'),
            ({}, t5, "is for text2text-generation, not for text-generation"),
        ]
    ):
        export_folder(llama, tmp_path / str(number), **{"proof": "sample", **how})
        with pytest.raises(InvalidArgumentError, match=words):
            explain_folder(tmp_path / str(number), compared)


HIDDEN, WIDE, HEADS, WINDOW = 64, 128, 4, 8  # sizes of the model


def _change(model, is_meant, changed):
    for value in model.graph.initializers.values():
        if is_meant(value.name, value.const_value):
            value.const_value = ir.tensor(changed(value.const_value.numpy().copy()), name=value.name)
            return
    raise AssertionError("there is nothing to change")


def _wrong_axis(model):
    node = next(node for node in model.graph if node.op_type == "RMSNormalization")
    node.attributes["axis"] = ir.AttrInt64("axis", 1)


def _lost_window(model):
    def is_window(_, tensor):
        return tensor.dtype == ir.DataType.INT64 and not tensor.shape and int(tensor.numpy()) == WINDOW

    _change(model, is_window, lambda window: window * 1000)


def _permuted_head(model):
    """Exchange heads of the queries, which are the first columns of one product for queries, keys and values."""

    def turned(weight):
        weight[:, :HIDDEN] = numpy.roll(weight[:, :HIDDEN], HIDDEN // HEADS, 1)
        return weight

    _change(model, lambda name, _: name.endswith("_joined"), turned)


def _rounded_weight(model):
    def rounded(weight):
        return (weight.view(numpy.uint32) & 0xFFFF0000).view(numpy.float32)

    _change(model, lambda _, tensor: tuple(tensor.shape) == (WIDE, HIDDEN), rounded)


def _stale_mask(model):
    (mask,) = (value for value in model.graph.inputs if value.name == "attention_mask")
    least = ir.node("Constant", [], {"value": ir.tensor(numpy.array([1]), name="one")})
    ones = ir.node("Max", [mask, least.outputs[0]])
    ir.convenience.replace_all_uses_with(mask, ones.outputs[0])
    ones.replace_input_with(0, mask)
    model.graph.insert_before(model.graph[0], [least, ones])


_PLANTED = {
    "a wrong axis": _wrong_axis,
    "a lost window": _lost_window,
    "a permuted head": _permuted_head,
    "a rounded weight": _rounded_weight,
    "a stale mask": _stale_mask,
}


@pytest.mark.parametrize("fault", ["none", *_PLANTED])
def test_the_standard_proof_finds(fault, tmp_path, monkeypatch):
    save = onnx_file.UnprovenFile.save
    planted = []

    def faulty(self, converted):
        if fault != "none":
            _PLANTED[fault](converted)
            planted.append(fault)
        return save(self, converted)

    monkeypatch.setattr(onnx_file.UnprovenFile, "save", faulty)
    # without simpler operators, which are tried where the fastest fail, and have no window to be lost
    fused = attempts._Attempt(ATTENTION_OPSET, fuse=True, share=True)
    monkeypatch.setattr(attempts, "_attempts", lambda *_: [fused])
    how = {"optimize": "onnxruntime", "proof": "standard", "overwrite": True}
    if fault == "none":
        assert list(_PLANTED) == list(FAULTS)
        assert export_folder(small_model("mistral"), tmp_path / "out", **how).verified.ok
        return
    with pytest.raises(FlattenError, match="differs from the eager"):
        export_folder(small_model("mistral"), tmp_path / "out", **how)
    assert planted
    assert not (tmp_path / "out").exists()
