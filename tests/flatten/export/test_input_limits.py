"""Inputs in two parts, small numbers and the rest of large ones: nearer the weights' product than in one part."""

import argparse
import copy
import math

import numpy
import onnx_ir as ir
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from tests.flatten.export.trained_model import text_of, trained_model
from yobx_flatten import DecodeSizes, decode_inputs, export_onnx
from yobx_flatten.export import Quantization
from yobx_flatten.export.onnx import quantized
from yobx_flatten.export.onnx.quantize import quantize_graph
from yobx_flatten.export.onnx.rounding.input_limits import _limit
from yobx_flatten.export.proof.quality import Quality


def _with_outliers(rows=48, width=128, seed=0):
    """Numbers around 1, and in each block one channel that is a hundred times as large, whatever the row."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=draw)
    x[:, 5::32] = 100 + 10 * torch.randn(rows, width // 32, generator=draw)
    return x


def _product(path, linear, x, **options):
    """What onnxruntime computes for a projection in 8 bits."""
    import onnxruntime

    free = ({0: torch.export.Dim.DYNAMIC},)
    export_onnx(linear, (x,), path=path, cases=[], dynamic_shapes=free)
    model = ir.load(path)
    quantize_graph(model, Quantization("int8"), **options)
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
    limit = _limit(_with_outliers(seed=2), 32)
    parted, graph = _product(tmp_path / "parts.onnx", linear, x, rounds_inputs=False, limits={"input": limit})
    assert [node.op_type for node in graph].count("Clip") == 1
    assert numpy.square(parted - wanted).mean() < 0.1 * numpy.square(whole - wanted).mean()
    exact, graph = _product(tmp_path / "exact.onnx", linear, x, rounds_inputs=False)
    assert [node.op_type for node in graph].count("Clip") == 0
    assert numpy.square(exact - wanted).mean() < 0.1 * numpy.square(parted - wanted).mean()


def test_a_limit_is_above_the_small_channels_and_below_the_large_ones():
    """One token whose numbers are a thousand times as large decides nothing; where all are 0 there is no limit."""
    x = _with_outliers()
    x[0] *= 1000
    assert 1 < _limit(x, 32) < 60
    assert _limit(torch.zeros(5, 64), 32) == 0


def test_inputs_without_large_numbers_stay_in_one_part(tmp_path):
    """Of numbers of one size two parts leave a third of the error, for five operators."""
    x = torch.rand(48, 128, generator=torch.Generator().manual_seed(0)) + 0.5
    assert _limit(x, 32) == math.inf
    linear = torch.nn.Linear(128, 40).eval()
    whole, _ = _product(tmp_path / "whole.onnx", linear, x)
    found, graph = _product(tmp_path / "m.onnx", linear, x, rounds_inputs=False, limits={"input": math.inf})
    assert [node.op_type for node in graph] == ["MatMulNBits", "Add"]
    assert numpy.array_equal(found, whole)


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
    """Its scores are several times nearer than with inputs in one part; the report names both."""
    import onnx

    model, losses, kinds = _spoiled(), {}, {}
    tokens = text_of(argparse)[:160].reshape(2, 80)
    kwargs = decode_inputs(model, DecodeSizes(batch=2, past=5, new=3))
    for kept in ("int8", "auto"):
        how, path = Quantization("int8", tokens=tokens, activations=kept), tmp_path / f"{kept}.onnx"
        report = export_onnx(model, kwargs=kwargs, path=path, cases=[], quantize=how).report
        kinds[kept] = [node.op_type for node in onnx.load(path).graph.node]
        losses[kept] = report.quality.text_divergence
    assert kinds["auto"].count("Clip") >= 4  # what norms write; other inputs may stay whole
    assert not {"Round", "Clip"} & {*kinds["int8"]}
    assert "Round" not in kinds["auto"]
    assert losses["auto"] < 0.5 * losses["int8"]
    assert [remark for remark in report.remarks if "in two parts" in remark]


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
    """In one part, in two, or as they are."""
    import onnx

    measured = iter([_quality(one) for one in (whole, parted, exact) if one is not None])
    monkeypatch.setattr(quantized, "measure", lambda *_, **__: next(measured))
    monkeypatch.setattr(quantized, "input_limits", lambda *_, **__: {"input": 0.5})
    linear, x = torch.nn.Linear(64, 64).eval(), torch.randn(3, 64)
    done = export_onnx(linear, (x,), path=tmp_path / "m.onnx", quantize="int8", cases=[])
    assert next(measured, None) is None
    kinds = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert ("Clip" in kinds, "Round" in kinds) == (kind == "parts", kind == "exact")
    assert done.report.quality.divergence == {"parts": parted, "exact": exact, "whole": whole}[kind]


def test_weights_stay_in_8_bits_where_only_their_inputs_cost_too_much(tmp_path, monkeypatch):
    """How inputs are rounded is decided before a matrix is put into full."""
    import onnx

    measured = iter([_quality(2e-2), _quality(4e-4)])  # perplexities 1.02 and 1.0004 times the model's; 1.01 is allowed
    monkeypatch.setattr(quantized, "measure", lambda *_, **__: next(measured))
    monkeypatch.setattr(quantized, "input_limits", lambda *_, **__: {"input": 0.5})
    layers, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).eval(), torch.randn(3, 64)
    done = export_onnx(layers, (x,), path=tmp_path / "m.onnx", quantize="int8", cases=[])
    kinds = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert (kinds.count("MatMulNBits"), kinds.count("MatMul")) == (2, 0)
    assert done.report.quality.divergence == 4e-4
