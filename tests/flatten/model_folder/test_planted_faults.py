"""Faults that are planted in a file before its proof: the proof of larger models, which is a short one, finds each."""

import numpy
import onnx_ir as ir
import pytest

from tests.accelerator.planted import FAULTS
from yobx_flatten import export_folder
from yobx_flatten.errors import FlattenError
from yobx_flatten.export.onnx import attempts
from yobx_flatten.export.onnx import file as onnx_file
from yobx_flatten.export.onnx.attempts import ATTENTION_OPSET
from yobx_flatten.model_folder.source.configuration import small_model

pytestmark = pytest.mark.slow


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


def test_every_planted_fault_is_listed():
    """The page of the developers' guide names those that are planted here."""
    assert list(_PLANTED) == list(FAULTS)


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
    monkeypatch.setattr(attempts, "_attempts", lambda _: [fused])
    how = {"optimize": "onnxruntime", "proof": "standard", "overwrite": True}
    if fault == "none":
        assert export_folder(small_model("mistral"), tmp_path / "out", **how).verified.ok
        return
    with pytest.raises(FlattenError, match="differs from the eager"):
        export_folder(small_model("mistral"), tmp_path / "out", **how)
    assert planted
    assert not (tmp_path / "out").exists()
