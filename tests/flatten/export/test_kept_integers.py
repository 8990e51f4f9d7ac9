"""Files that hold the integers a checkpoint had: onnxruntime computes with the same weights."""

import numpy
import onnx
import onnxruntime
import pytest
import torch

from tests.flatten.export.test_weight_grid import COLUMNS, ROWS, _made
from yobx_flatten import InvalidArgumentError, export_onnx
from yobx_flatten.export.quantization import Quantization

FORMS = {
    "8 below": {"levels": 16, "first": -8},
    "whole zero points": {"levels": 16, "first": -3},
    "a lowest weight": {"levels": 16, "first": 0, "lowest": True},
    "8 bits": {"levels": 255, "first": -127},
    "8 bits, a lowest weight": {"levels": 32, "first": 0, "lowest": True},
}


def _linear(bias=False, **form):
    with torch.random.fork_rng(devices=[]):
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=bias).eval()
    form.setdefault("block", 32)
    linear.weight = torch.nn.Parameter(torch.from_numpy(_made(**form)))
    return linear


def _graph(path):
    return onnx.load(path).graph


@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize("name", FORMS)
def test_a_product_is_that_of_the_same_weights(tmp_path, name, block):
    """The rows of the identity read them out, which the operator's rounding of activations leaves as they are."""
    linear, path = _linear(block=block, **FORMS[name]), tmp_path / "m.onnx"
    x = torch.eye(COLUMNS)
    export_onnx(linear, (x,), path=path, cases=[], quantize="keep", dynamic_shapes=None)
    assert [node.op_type for node in _graph(path).node].count("MatMulNBits") == 1
    found = onnxruntime.InferenceSession(path).run(None, {"input": x.numpy()})[0]
    apart = numpy.abs(found.T - linear.weight.detach().numpy())
    assert float(apart.max()) <= 4e-6 * float(linear.weight.detach().abs().max())


@pytest.mark.parametrize("name", FORMS)
def test_integers_take_the_room_of_their_bits(tmp_path, name):
    """4 or 8 bits, scales of 32 bits for 32 weights, and 16 bits for a lowest weight."""
    linear, path = _linear(**FORMS[name]), tmp_path / "m.onnx"
    export_onnx(linear, (torch.zeros(2, COLUMNS),), path=path, cases=[], quantize="keep")
    bits = (8 if "8 bits" in name else 4) + 1 + 0.5 * ("lowest" in name) + 0.125 * ("whole" in name)
    stored = sum(len(tensor.raw_data) for tensor in _graph(path).initializer)
    assert stored == linear.weight.numel() * bits / 8


def test_a_product_with_a_bias_and_others_of_the_same_inputs(tmp_path):

    class Three(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList(_linear(bias=True, seed=n, **FORMS["a lowest weight"]) for n in range(3))

        def forward(self, x):
            return sum(part(x) for part in self.parts)

    model, path = Three().eval(), tmp_path / "m.onnx"
    x = torch.from_numpy(numpy.random.default_rng(0).standard_normal((2, 5, COLUMNS)).astype(numpy.float32))
    export_onnx(model, (x,), path=path, cases=[], quantize="keep")
    kinds = [node.op_type for node in _graph(path).node]
    assert (kinds.count("MatMulNBits"), kinds.count("ReduceSum")) == (3, 1)
    found = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})[0]
    with torch.no_grad():
        assert float((torch.from_numpy(found) - model(x)).norm() / model(x).norm()) < 0.01  # activations in 8 bits


@pytest.mark.parametrize("name", FORMS)
def test_an_embedding_alone_is_kept_too(tmp_path, name):

    class Reader(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(ROWS, COLUMNS)
            self.table.weight = torch.nn.Parameter(torch.from_numpy(_made(block=32, **FORMS[name])))
            self.head = _linear(seed=1, **FORMS[name])

        def forward(self, ids):
            return self.table(ids), self.head(self.table(ids))

    model, path, ids = Reader().eval(), tmp_path / "m.onnx", torch.arange(ROWS).reshape(4, 10)
    report = export_onnx(model, (ids,), path=path, cases=[], quantize="keep").report
    assert report.onnx_bytes < 0.4 * 4 * 2 * ROWS * COLUMNS
    rows = onnxruntime.InferenceSession(path).run(None, {"ids": ids.numpy()})[0]
    apart = numpy.abs(rows - model.table(ids).detach().numpy())
    assert float(apart.max()) <= 4e-6 * float(model.table.weight.detach().abs().max())


def test_a_head_and_its_embedding_are_one_table_of_integers(tmp_path):

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(ROWS, COLUMNS)
            self.head = _linear(**FORMS["a lowest weight"])
            self.table.weight = self.head.weight

        def forward(self, ids):
            return self.head(self.table(ids))

    model, path = Tied().eval(), tmp_path / "m.onnx"
    report = export_onnx(model, (torch.arange(6).reshape(2, 3),), path=path, cases=[], quantize="int4").report
    assert any("in the file once" in remark for remark in report.remarks)
    assert any(remark.startswith("already integers with scales") for remark in report.remarks)
    assert report.onnx_bytes < 0.25 * 4 * ROWS * COLUMNS
    assert report.quality.relative_difference < 0.01


def test_half_precision_keeps_integers_too(tmp_path):
    linear, path = _linear(**FORMS["a lowest weight"]).half(), tmp_path / "m.onnx"
    x = torch.from_numpy(numpy.random.default_rng(0).standard_normal((3, COLUMNS))).half()
    quality = export_onnx(linear, (x,), path=path, cases=[], quantize="keep").report.quality
    assert quality.relative_difference < 0.02
    assert [node.op_type for node in _graph(path).node].count("MatMulNBits") == 1


def test_int4_rounds_what_has_no_integers_and_keeps_the_rest(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, COLUMNS), _linear(**FORMS["8 below"])).eval()
    report = export_onnx(model, (torch.randn(3, 64),), path=tmp_path / "m.onnx", cases=[], quantize="int4").report
    (note,) = [remark for remark in report.remarks if remark.startswith("already integers")]
    assert f"{ROWS * COLUMNS / 1e6:.3g} million in 4 bits" in note
    zeros = [tensor for tensor in _graph(tmp_path / "m.onnx").initializer if "zero_points" in tensor.name]
    assert len(zeros) == 1


@pytest.mark.parametrize("quantize", ["keep", "int8"])
@pytest.mark.parametrize("name", FORMS)
def test_a_session_without_optimisation_computes_the_same(tmp_path, name, quantize):
    """onnxruntime's product with scales that are no constants is zero then, and no error."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(1200, 64)
            self.middle = torch.nn.Linear(64, COLUMNS)
            self.head = _linear(**FORMS[name])

        def forward(self, ids):
            return self.head(self.middle(self.table(ids)))

    model, path, ids = Tied().eval(), tmp_path / "m.onnx", torch.arange(6).reshape(2, 3)
    export_onnx(model, (ids,), path=path, cases=[], quantize=quantize)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain = onnxruntime.InferenceSession(path, options).run(None, {"ids": ids.numpy()})[0]
    usual = onnxruntime.InferenceSession(path).run(None, {"ids": ids.numpy()})[0]
    # a last digit of what is multiplied can be rounded to another one of its 8 bits
    allowed = 1e-4 if quantize == "keep" else 2e-2
    assert float(numpy.abs(plain - usual).max()) <= allowed * float(numpy.abs(usual).max())


def test_nothing_to_keep_is_said(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r'no weight of Linear is stored as integers.*quantize="int4"'):
        export_onnx(torch.nn.Linear(64, 64), (torch.zeros(2, 64),), path=tmp_path / "m.onnx", cases=[], quantize="keep")
    assert not (tmp_path / "m.onnx").exists()
    assert Quantization("keep").allowed == 1.01
