"""Inputs in two parts, as two rows or with large channels in float: nearer the weights' product than in one part."""

import argparse
import copy
import math

import numpy
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from tests.flatten.export.trained_model import text_of, trained_model
from yobx_flatten import DecodeSizes, decode_inputs, export_onnx
from yobx_flatten.export import Quantization
from yobx_flatten.export.onnx import quantized, rounding
from yobx_flatten.export.onnx.quantize import quantize_graph
from yobx_flatten.export.onnx.rounding import _split
from yobx_flatten.export.onnx.stored_matrix import InputSplit
from yobx_flatten.export.proof.quality import Quality


def _with_outliers(rows=48, width=128, seed=0):
    """Numbers around 1, and in each block one channel that is a hundred times as large, whatever the row."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=draw)
    x[:, 5::32] = 100 + 10 * torch.randn(rows, width // 32, generator=draw)
    return x


def _product(path, linear, x, how="int8", **options):
    free = ({0: torch.export.Dim.DYNAMIC},)
    export_onnx(linear, (x,), path=path, cases=[], dynamic_shapes=free)
    model = ir.load(path)
    quantize_graph(model, Quantization(how), **options)
    ir.save(model, path)
    return onnxruntime.InferenceSession(path).run(None, {"input": x.numpy()})[0], model.graph


def test_a_limit_brings_back_what_large_channels_cost_the_others(tmp_path):
    """Next to the product of float64 with the weights in the file; 32 weights of 127 steps are stored exactly."""
    draw = torch.Generator().manual_seed(1)
    linear, x = torch.nn.Linear(128, 40).eval(), _with_outliers()
    numbers = torch.randint(-126, 127, (40, 4, 32), generator=draw).float()
    numbers[..., 0] = 127
    with torch.no_grad():
        linear.weight.copy_((numbers * 0.001).reshape(40, 128))
    wanted = (x.double() @ linear.weight.T.double() + linear.bias).detach().numpy()
    whole, _ = _product(tmp_path / "whole.onnx", linear, x)
    split = _split(_with_outliers(seed=2), 32)
    parted, graph = _product(tmp_path / "parts.onnx", linear, x, rounds_inputs=False, splits={"input": split})
    assert [node.op_type for node in graph].count("Clip") == 1
    assert numpy.square(parted - wanted).mean() < 0.1 * numpy.square(whole - wanted).mean()
    exact, graph = _product(tmp_path / "exact.onnx", linear, x, rounds_inputs=False)
    assert [node.op_type for node in graph].count("Clip") == 0
    assert numpy.square(exact - wanted).mean() < 0.1 * numpy.square(parted - wanted).mean()


def test_a_limit_is_above_the_small_channels_and_below_the_large_ones():
    x = _with_outliers()
    x[0] *= 1000
    assert 1 < _split(x, 32).limit < 60
    assert _split(torch.zeros(5, 64), 32) is None


def test_inputs_without_large_numbers_stay_in_one_part(tmp_path):
    """Of numbers of one size two parts leave a third of the error, for five operators."""
    x = torch.rand(48, 128, generator=torch.Generator().manual_seed(0)) + 0.5
    assert _split(x, 32) == InputSplit(math.inf)
    linear = torch.nn.Linear(128, 40).eval()
    whole, _ = _product(tmp_path / "whole.onnx", linear, x)
    found, graph = _product(tmp_path / "m.onnx", linear, x, rounds_inputs=False, splits={"input": InputSplit(math.inf)})
    assert [node.op_type for node in graph] == ["MatMulNBits", "Add"]
    assert numpy.array_equal(found, whole)


def _with_large_channels(rows=64, width=576, seed=0):
    """Numbers around 1, and the same 12 channels of up to fifty times the size in each row."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=draw)
    x[:, 4::48] *= torch.linspace(10, 50, 12)
    return x


def test_large_channels_are_found_where_they_are_the_same_for_all_tokens():
    """Where each token has others, two rows are nearer; an input of less than 48 channels has none of its own."""
    assert _split(_with_large_channels(), 32) == InputSplit(channels=tuple(range(4, 576, 48)))
    draw = torch.Generator().manual_seed(3)
    moving = torch.randn(64, 288, generator=draw)
    moving[torch.arange(64)[:, None], torch.rand(64, 288, generator=draw).argsort(1)[:, :9]] *= 50
    assert 0 < _split(moving, 32).limit < math.inf
    assert not _split(moving, 32).channels
    few = _split(_with_large_channels()[:, :32], 32)
    assert not few.channels
    assert 0 < few.limit < math.inf


def _stored(bits, columns=40, width=576):
    """A projection whose weights are integers of so many bits: 4 with a lowest weight for each block (Q4_1), or 8."""
    draw = torch.Generator().manual_seed(1)
    most = 2**bits
    numbers = torch.randint(0, most, (columns, width // 32, 32), generator=draw)
    numbers[..., 0], numbers[..., 1] = 0, most - 1
    scales = (torch.rand(columns, width // 32, 1, generator=draw) * 0.01 + 0.001).half().float()
    lowest = (
        (torch.randn(columns, width // 32, 1, generator=draw) * 0.05).half().float() if bits == 4 else -128 * scales
    )
    linear = torch.nn.Linear(width, columns).eval()
    with torch.no_grad():
        linear.weight.copy_((numbers * scales + lowest).reshape(columns, width))
    return linear


@pytest.mark.parametrize("bits", [4, 8])
def test_large_channels_in_float_are_nearer_than_two_rows(tmp_path, bits):
    text, x = _with_large_channels(), _with_large_channels(seed=2)
    x[0] *= 3
    linear, split = _stored(bits), _split(text, 32)
    wanted = (x.double() @ linear.weight.T.double() + linear.bias).detach().numpy()
    forms = {
        "one": {},
        "rows": {"rounds_inputs": False, "splits": {"input": InputSplit(10.0)}},
        "channels": {"rounds_inputs": False, "splits": {"input": split}},
        "float": {"rounds_inputs": False},
    }
    errors, nodes = {}, {}
    for name, options in forms.items():
        found, graph = _product(tmp_path / f"{name}.onnx", linear, x, "keep", **options)
        nodes[name] = [(node.op_type, node.attributes.get("accuracy_level")) for node in graph]
        errors[name] = numpy.square(found - wanted).mean(1) / numpy.square(wanted).mean(1)
    kinds = {name: [kind for kind, _ in found] for name, found in nodes.items()}
    assert {name for name, found in kinds.items() if "Clip" in found} == {"rows"}
    assert kinds["channels"].count("Gather") == kinds["channels"].count("MatMul") == 1
    levels = {name: [level.value for _, level in found if level is not None] for name, found in nodes.items()}
    assert levels == {"one": [4], "rows": [4], "channels": [4], "float": [1 if bits == 4 else 4]}
    assert errors["channels"].mean() < errors["rows"].mean()
    assert errors["channels"][1:].mean() < 0.05 * errors["one"][1:].mean()
    assert errors["channels"][0] < 0.1 * errors["one"][0]
    assert errors["float"].mean() < 0.01 * errors["channels"].mean()


def test_products_of_the_same_inputs_share_the_parts(tmp_path):

    class Three(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList(_stored(4) for _ in range(3))

        def forward(self, x):
            return [part(x) for part in self.parts]

    model, path, x = Three().eval(), tmp_path / "m.onnx", _with_large_channels(6).reshape(2, 3, -1)
    free = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    export_onnx(model, (x,), path=path, cases=[], dynamic_shapes=free)
    stored = ir.load(path)
    quantize_graph(stored, Quantization("keep"), rounds_inputs=False, splits={"x": _split(_with_large_channels(), 32)})
    ir.save(stored, path)
    kinds = [node.op_type for node in stored.graph]
    assert [kinds.count(kind) for kind in ("ReduceSum", "MatMulNBits", "MatMul")] == [1, 3, 3]
    shared = [node for node in stored.graph if node.inputs and node.inputs[0] is stored.graph.inputs[0]]
    assert sorted(node.op_type for node in shared) == ["Gather", "Mul"]
    session = onnxruntime.InferenceSession(path)
    for batch in (0, 1, 5):
        given = _with_large_channels(batch * 4, seed=5).reshape(batch, 4, 576)
        with torch.no_grad():
            wanted = model(given)
        for found, expected in zip(session.run(None, {"x": given.numpy()}), wanted, strict=True):
            most = 5e-3 * float(expected.abs().max()) if batch else 0
            numpy.testing.assert_allclose(found, expected.numpy(), atol=most)


def test_layers_that_share_a_matrix_have_large_channels_of_their_own(tmp_path):
    """As those of ALBERT: the rows in float are those that meet the channels of each input."""

    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.part = _stored(4)

        def forward(self, x, y):
            return self.part(x), self.part(y)

    model, path = Shared().eval(), tmp_path / "m.onnx"
    given = {"x": _with_large_channels(6), "y": _with_large_channels(6, seed=4).roll(7, 1)}
    export_onnx(model, tuple(given.values()), path=path, cases=[])
    stored = ir.load(path)
    splits = {"x": tuple(range(4, 576, 48)), "y": tuple(range(11, 576, 48))}
    splits = {name: InputSplit(channels=channels) for name, channels in splits.items()}
    quantize_graph(stored, Quantization("keep"), rounds_inputs=False, splits=splits)
    ir.save(stored, path)
    feeds = {name: value.numpy() for name, value in given.items()}
    found = onnxruntime.InferenceSession(path).run(None, feeds)
    with torch.no_grad():
        wanted = model(*given.values())
    for one, expected in zip(found, wanted, strict=True):
        numpy.testing.assert_allclose(one, expected.numpy(), atol=5e-3 * float(expected.abs().max()))


def _spoiled():
    """A trained model, the same function, with channels of a hundred times the size before each product."""
    model = copy.deepcopy(trained_model())
    channels = slice(3, None, 32)
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            readers = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
            for norm, projections in zip((layer.input_layernorm, layer.post_attention_layernorm), readers, strict=True):
                norm.weight[channels] *= 100
                for projection in projections:
                    projection.weight[:, channels] /= 100
    return model


def test_a_model_with_large_channels_is_written_with_inputs_in_two_parts(tmp_path):
    model, losses, kinds = _spoiled(), {}, {}
    tokens = text_of(argparse)[:160].reshape(2, 80)
    kwargs = decode_inputs(model, DecodeSizes(batch=2, past=5, new=3))
    for kept in ("int8", "auto"):
        how, path = Quantization("int8", tokens=tokens, activations=kept), tmp_path / f"{kept}.onnx"
        report = export_onnx(model, kwargs=kwargs, path=path, cases=[], quantize=how).report
        kinds[kept] = [node.op_type for node in onnx.load(path).graph.node]
        losses[kept] = report.quality.text_divergence
    assert kinds["auto"].count("Gather") > kinds["int8"].count("Gather")  # after norms; other inputs may stay whole
    assert not {"Round", "Clip", "Abs"} & {*kinds["int8"]}
    assert "Abs" not in kinds["auto"]  # the exact rest of each number, for inputs without a text
    assert losses["auto"] < 0.5 * losses["int8"]
    assert [remark for remark in report.remarks if "in two parts" in remark]


@pytest.mark.parametrize("weights", ["int8", "keep"])
def test_a_head_that_an_embedding_reads_is_split_too(tmp_path, monkeypatch, weights):
    """The stored matrix is the same, so a tied table needs no second copy; two rows for all inputs are no nearer."""
    model, losses, sizes = _spoiled(), {}, {}
    with torch.no_grad():
        model.model.norm.weight[3::32] *= 100
        model.lm_head.weight[:, 3::32] /= 100
        for matrix in [one for one in model.parameters() if one.dim() == 2] if weights == "keep" else []:
            steps = matrix.reshape(len(matrix), -1, 32).abs().amax(2, keepdim=True) / 127
            matrix.copy_((matrix.reshape(len(matrix), -1, 32) / steps).round().mul(steps).reshape(matrix.shape))
    tokens = text_of(argparse)[:160].reshape(2, 80)
    kwargs = decode_inputs(model, DecodeSizes(batch=2, past=5, new=3))
    for name, share in (("rows", 10**6), ("channels", 32)):
        monkeypatch.setattr(rounding, "_SHARE", share)
        path, how = tmp_path / f"{name}.onnx", Quantization(weights, tokens=tokens, activations="split")
        report = export_onnx(model, kwargs=kwargs, path=path, cases=[], quantize=how).report
        kinds = [node.op_type for node in onnx.load(path).graph.node]
        sizes[name] = kinds.count("Gather"), kinds.count("Clip")
        losses[name] = report.quality.text_divergence
        head = [node for node in onnx.load(path).graph.node if node.op_type == "MatMulNBits"][-1]
        assert {one.name: one.i for one in head.attribute}["K"] == 128
    assert sizes["channels"][0] > sizes["rows"][0]
    assert sizes["channels"][1] < sizes["rows"][1]
    assert losses["channels"] < 2 * losses["rows"]


def _quality(divergence):
    return Quality("int8", 32, 10, 0.1, 0.01, 0.01, 1.0, divergence, 0, None, None, 1.01)


@pytest.mark.parametrize(
    ("whole", "parted", "exact", "kind"),
    [
        (3e-3, 4e-4, None, "parts"),  # near enough: inputs as they are need not be measured
        (5e-3, 2e-3, None, "parts"),
        (5e-3, 2.1e-3, 1.5e-3, "parts"),  # the weights cost as much
        (5e-3, 4e-3, 1e-3, "exact"),
        (5e-4, 4e-4, 3e-4, "whole"),  # two parts gain little
    ],
)
def test_inputs_are_as_near_as_the_weights_are_worth(tmp_path, monkeypatch, whole, parted, exact, kind):
    measured = iter([_quality(one) for one in (whole, parted, exact) if one is not None])
    monkeypatch.setattr(quantized, "measure", lambda *_, **__: next(measured))
    monkeypatch.setattr(quantized, "input_splits", lambda *_, **__: {"input": InputSplit(0.5)})
    linear, x = torch.nn.Linear(64, 64).eval(), torch.randn(3, 64)
    done = export_onnx(linear, (x,), path=tmp_path / "m.onnx", quantize="int8", cases=[])
    assert next(measured, None) is None
    kinds = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert ("Clip" in kinds, "Round" in kinds) == (kind == "parts", kind == "exact")
    assert done.report.quality.divergence == {"parts": parted, "exact": exact, "whole": whole}[kind]


def test_weights_stay_in_8_bits_where_only_their_inputs_cost_too_much(tmp_path, monkeypatch):
    """How inputs are rounded is decided before a matrix is put into full."""
    measured = iter([_quality(2e-2), _quality(4e-4)])  # perplexities 1.02 and 1.0004 times the model's; 1.01 is allowed
    monkeypatch.setattr(quantized, "measure", lambda *_, **__: next(measured))
    monkeypatch.setattr(quantized, "input_splits", lambda *_, **__: {"input": InputSplit(0.5)})
    layers, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).eval(), torch.randn(3, 64)
    done = export_onnx(layers, (x,), path=tmp_path / "m.onnx", quantize="int8", cases=[])
    kinds = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert (kinds.count("MatMulNBits"), kinds.count("MatMul")) == (2, 0)
    assert done.report.quality.divergence == 4e-4
