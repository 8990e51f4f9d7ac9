"""Inputs in two parts, as two rows or with columns for large channels: nearer the weights' product than in one part."""

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
from yobx_flatten.export.onnx import quantized, rounding
from yobx_flatten.export.onnx.quantize import products_of, quantize_graph
from yobx_flatten.export.onnx.rounding import _large_last, _split, _takes_large, round_with_feedback
from yobx_flatten.export.onnx.stored_matrix import InputSplit
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
    split = _split(_with_outliers(seed=2), 32)
    parted, graph = _product(tmp_path / "parts.onnx", linear, x, rounds_inputs=False, splits={"input": split})
    assert [node.op_type for node in graph].count("Clip") == 1
    assert numpy.square(parted - wanted).mean() < 0.1 * numpy.square(whole - wanted).mean()
    exact, graph = _product(tmp_path / "exact.onnx", linear, x, rounds_inputs=False)
    assert [node.op_type for node in graph].count("Clip") == 0
    assert numpy.square(exact - wanted).mean() < 0.1 * numpy.square(parted - wanted).mean()


def test_a_limit_is_above_the_small_channels_and_below_the_large_ones():
    """One token whose numbers are a thousand times as large decides nothing; where all are 0 there is no limit."""
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


def _with_large_channels(rows=64, width=288, seed=0):
    """Numbers around 1, and the same 31 channels of up to fifty times the size in each row."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=draw)
    x[:, 4::9][:, :31] *= torch.linspace(10, 50, 31)
    return x


def test_large_channels_are_found_where_they_are_the_same_for_all_tokens():
    """Where each token has others, two rows are nearer; a small input would have an eighth more weights, or more."""
    split = _split(_with_large_channels(), 32)
    assert sorted(split.channels) == list(range(4, 283, 9))
    assert split.step == pytest.approx(float(_with_large_channels().abs().max()) / 127)
    draw = torch.Generator().manual_seed(3)
    moving = torch.randn(64, 288, generator=draw)
    moving[torch.arange(64)[:, None], torch.rand(64, 288, generator=draw).argsort(1)[:, :9]] *= 50
    assert 0 < _split(moving, 32).limit < math.inf
    assert not _split(moving, 32).channels
    assert not _split(_with_large_channels()[:, :224], 32).channels


def test_large_channels_apart_are_the_same_product():
    """Whole steps times the rows again, and what is left; also of a token that is larger than those of the text."""
    x, split = _with_large_channels(), _split(_with_large_channels(), 32)
    x[5] *= 3
    weights = torch.randn(288, 40, generator=torch.Generator().manual_seed(1))
    apart = split.apart(x)
    steps = apart[:, :32] / split.step
    assert torch.allclose(steps, steps.round(), atol=1e-4)
    assert steps[:5].abs().max() < 127.5 < steps[5].abs().max()
    wanted = x.double() @ weights.double()
    assert torch.allclose(apart.double() @ split.rows(weights).double(), wanted, rtol=1e-5, atol=1e-3)


def _rounded_as_inputs(inputs, weights):
    """Weights of shape (inputs, outputs) in 8 bits, by inputs of a text."""
    each = inputs / inputs.square().mean(1, keepdim=True).sqrt()
    return round_with_feedback(weights, each.T @ each / len(each), 32, bits=8)


def test_a_block_of_columns_is_as_near_as_two_rows(tmp_path):
    """In onnxruntime, next to the product of float64 with the weights of the file, and for a token above the text's."""
    draw = torch.Generator().manual_seed(1)
    text, x = _with_large_channels(), _with_large_channels(seed=2)
    x[0] *= 3
    linear = torch.nn.Linear(288, 40, bias=False).eval()
    with torch.no_grad():
        linear.weight.copy_(torch.randn(40, 288, generator=draw) * 0.05)
    split, weights = _split(text, 32), linear.weight.detach().T
    whole = _rounded_as_inputs(text, weights)
    large = _large_last(_rounded_as_inputs(split.apart(text), split.rows(weights)), split.step)
    apart = split.apart(x)
    read = {"one": (x, whole), "rows": (x, whole), "columns": (apart.roll(-32, 1), large)}
    read["columns"][0][:, -32:] /= split.step
    forms = {
        "one": {},
        "rows": {"rounds_inputs": False, "splits": {"input": InputSplit(split.limit)}},
        "columns": {"rounds_inputs": False, "splits": {"input": split}},
    }
    errors, nodes = {}, {}
    for name, options in forms.items():
        inputs, grid = read[name]
        found, graph = _product(tmp_path / f"{name}.onnx", linear, x, rounded={("weight", True): grid}, **options)
        wanted = inputs.double().numpy() @ grid.weights().T.astype(float)
        errors[name], nodes[name] = numpy.square(found - wanted).mean(1), [node.op_type for node in graph]
    assert {name: "Clip" in kinds for name, kinds in nodes.items()} == {"one": False, "rows": True, "columns": False}
    assert nodes["columns"].count("MatMulNBits") == nodes["columns"].count("Pad") == 1
    usual = {name: error[1:].mean() for name, error in errors.items()}
    assert usual["columns"] < 2 * usual["rows"]
    assert usual["columns"] < 0.05 * usual["one"]
    assert errors["columns"][0] < errors["one"][0]


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
    split = [kinds["auto"].count(kind) - kinds["int8"].count(kind) for kind in ("Clip", "Round", "Concat")]
    assert split[0] + split[1] == split[2] >= 4  # what norms write; other inputs may stay whole
    assert not {"Round", "Clip", "Abs"} & {*kinds["int8"]}
    assert "Abs" not in kinds["auto"]  # the exact rest of each number, for inputs without a text
    assert losses["auto"] < 0.5 * losses["int8"]
    assert [remark for remark in report.remarks if "in two parts" in remark]


def test_large_channels_of_a_model_get_columns(tmp_path, monkeypatch):
    """As near as two rows; the head's product also gets them, with a block of inputs more."""
    import onnx

    model, losses = _spoiled(), {}
    with torch.no_grad():
        model.model.norm.weight[3::32] *= 100
        model.lm_head.weight[:, 3::32] /= 100
    tokens = text_of(argparse)[:160].reshape(2, 80)
    kwargs = decode_inputs(model, DecodeSizes(batch=2, past=5, new=3))
    for name, blocks in (("rows", 100), ("columns", 2)):  # from how many blocks on
        monkeypatch.setattr(rounding, "_BLOCKS", blocks)
        path, how = tmp_path / f"{name}.onnx", Quantization("int8", tokens=tokens)
        report = export_onnx(model, kwargs=kwargs, path=path, cases=[], quantize=how).report
        kinds = [node.op_type for node in onnx.load(path).graph.node]
        assert kinds.count("Round") >= 4 if name == "columns" else "Round" not in kinds
        losses[name] = report.quality.text_divergence
        head = [node for node in onnx.load(path).graph.node if node.op_type == "MatMulNBits"][-1]
        sizes = {one.name: one.i for one in head.attribute}
        assert sizes["N"] == model.config.vocab_size
        assert sizes["K"] == (160 if name == "columns" else 128)
    assert losses["columns"] < 2 * losses["rows"]


class _Tied(torch.nn.Module):
    """An embedding, and a product with its table or a matrix of its own."""

    def __init__(self, is_tied):
        super().__init__()
        self.table, self.other = torch.nn.Embedding(300, 288), torch.nn.Linear(288, 300, bias=False)
        if is_tied:
            self.other.weight = self.table.weight

    def forward(self, tokens):
        """Scores for the next token."""
        return self.other(self.table(tokens).tanh())


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_table_that_an_embedding_reads_has_no_further_rows(tmp_path, is_tied):
    """Its rows are what a token is."""
    export_onnx(_Tied(is_tied).eval(), (torch.arange(6)[None],), path=tmp_path / "m.onnx", cases=[])
    ((node, (value, _)),) = products_of(ir.load(tmp_path / "m.onnx"), Quantization("int8"))
    x = node.inputs[0]
    splits = {x.name: InputSplit(0.5, list(range(31)), 0.1)}
    assert _takes_large(x, value, splits) is not is_tied
    assert not _takes_large(x, value, {x.name: InputSplit(0.5)})


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
    monkeypatch.setattr(quantized, "input_splits", lambda *_, **__: {"input": InputSplit(0.5)})
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
    monkeypatch.setattr(quantized, "input_splits", lambda *_, **__: {"input": InputSplit(0.5)})
    layers, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).eval(), torch.randn(3, 64)
    done = export_onnx(layers, (x,), path=tmp_path / "m.onnx", quantize="int8", cases=[])
    kinds = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert (kinds.count("MatMulNBits"), kinds.count("MatMul")) == (2, 0)
    assert done.report.quality.divergence == 4e-4
