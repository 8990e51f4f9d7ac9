"""Inputs of quantised products: in two parts, with large channels in float, or with one scale for each token."""

import argparse
import copy
import json
import math

import numpy
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from tests.flatten.export.trained_model import text_of, trained_model
from tests.modules import module_of
from yobx_flatten import DecodeSizes, ReplayError, decode_inputs, export_folder, export_onnx, verify_folder
from yobx_flatten.export import Quality, Quantization
from yobx_flatten.export.onnx import quantized, rounding
from yobx_flatten.export.onnx.quantize import quantize_model
from yobx_flatten.export.onnx.quantized import _channels
from yobx_flatten.export.onnx.rounding import _split, round_with_feedback
from yobx_flatten.export.onnx.weights import InputSplit
from yobx_flatten.export.proof import quality
from yobx_flatten.model_folder.source.configuration import small_model


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
    quantize_model(model, Quantization(how), **options)
    ir.save(model, path)
    return onnxruntime.InferenceSession(path).run(None, {"input": x.numpy()})[0], model.graph


def test_a_limit_brings_back_what_large_channels_cost_the_others(tmp_path):
    """Of inputs without large numbers two parts leave a third of the error, for five operators: they stay whole."""
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
    x = torch.rand(48, 128, generator=draw) + 0.5
    assert _split(x, 32) == InputSplit(math.inf)
    whole, _ = _product(tmp_path / "m.onnx", linear, x)
    found, graph = _product(tmp_path / "m.onnx", linear, x, rounds_inputs=False, splits={"input": InputSplit(math.inf)})
    assert [node.op_type for node in graph] == ["MatMulNBits", "Add"]
    assert numpy.array_equal(found, whole)


def _with_large_channels(rows=64, width=576, seed=0):
    """Numbers around 1, and the same 12 channels of up to fifty times the size in each row."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=draw)
    x[:, 4::48] *= torch.linspace(10, 50, 12)
    return x


def test_large_channels_are_found_where_they_are_the_same_for_all_tokens_and_a_limit_below_others():
    assert _split(_with_large_channels(), 32) == InputSplit(channels=tuple(range(4, 576, 48)))
    draw = torch.Generator().manual_seed(3)
    moving = torch.randn(64, 288, generator=draw)
    moving[torch.arange(64)[:, None], torch.rand(64, 288, generator=draw).argsort(1)[:, :9]] *= 50
    for inputs in (moving, _with_large_channels()[:, :32]):  # channels that change, and too few
        split = _split(inputs, 32)
        assert 0 < split.limit < math.inf
        assert not split.channels
    x = _with_outliers()
    x[0] *= 1000
    assert 1 < _split(x, 32).limit < 60
    assert _split(torch.zeros(5, 64), 32) is None


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


def _kept(path, splits):
    stored = ir.load(path)
    quantize_model(stored, Quantization("keep"), rounds_inputs=False, splits=splits)
    ir.save(stored, path)
    return stored.graph, onnxruntime.InferenceSession(path)


def test_products_of_the_same_inputs_share_the_parts(tmp_path):
    parts, path, x = (
        torch.nn.ModuleList([_stored(4) for _ in range(3)]),
        tmp_path / "m.onnx",
        _with_large_channels(6).reshape(2, 3, -1),
    )
    model = module_of(lambda self, x: [part(x) for part in self.parts], parts=parts)
    free = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    export_onnx(model, (x,), path=path, cases=[], dynamic_shapes=free)
    graph, session = _kept(path, {"x": _split(_with_large_channels(), 32)})
    kinds = [node.op_type for node in graph]
    assert [kinds.count(kind) for kind in ("ReduceSum", "MatMulNBits", "MatMul")] == [1, 3, 3]
    shared = [node for node in graph if node.inputs and node.inputs[0] is graph.inputs[0]]
    assert sorted(node.op_type for node in shared) == ["Gather", "Mul"]
    for batch in (0, 1, 5):
        given = _with_large_channels(batch * 4, seed=5).reshape(batch, 4, 576)
        with torch.no_grad():
            wanted = model(given)
        for found, expected in zip(session.run(None, {"x": given.numpy()}), wanted, strict=True):
            most = 5e-3 * float(expected.abs().max()) if batch else 0
            numpy.testing.assert_allclose(found, expected.numpy(), atol=most)


def test_layers_that_share_a_matrix_have_large_channels_of_their_own(tmp_path):
    """As those of ALBERT: the rows in float are those that meet the channels of each input."""
    path, parts = tmp_path / "m.onnx", torch.nn.ModuleList([_stored(4)])
    model = module_of(lambda self, x, y: (self.parts[0](x), self.parts[0](y)), parts=parts)
    given = {"x": _with_large_channels(6), "y": _with_large_channels(6, seed=4).roll(7, 1)}
    export_onnx(model, tuple(given.values()), path=path, cases=[])
    splits = {name: InputSplit(channels=tuple(range(first, 576, 48))) for name, first in (("x", 4), ("y", 11))}
    _, session = _kept(path, splits)
    found = session.run(None, {name: value.numpy() for name, value in given.items()})
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


def _written(model, path, weights, kept):
    """Return the operators of the file, and the report."""
    tokens = text_of(argparse)[:160].reshape(2, 80)
    kwargs = decode_inputs(model, DecodeSizes(batch=2, past=5, new=3))
    how = Quantization(weights, tokens=tokens, activations=kept)
    report = export_onnx(model, kwargs=kwargs, path=path, cases=[], quantize=how).report
    return [node.op_type for node in onnx.load(path).graph.node], report


def test_a_model_with_large_channels_is_written_with_inputs_in_two_parts(tmp_path):
    model = _spoiled()
    plain, first = _written(model, tmp_path / "int8.onnx", "int8", "int8")
    parted, second = _written(model, tmp_path / "auto.onnx", "int8", "auto")
    assert parted.count("Gather") > plain.count("Gather")  # after norms; other inputs may stay whole
    assert not {"Round", "Clip", "Abs"} & {*plain}
    assert "Abs" not in parted  # the exact rest of each number, for inputs without a text
    assert second.quality.text_divergence < 0.5 * first.quality.text_divergence
    assert [remark for remark in second.remarks if "in two parts" in remark]


@pytest.mark.parametrize("weights", ["int8", "keep"])
def test_a_head_that_an_embedding_reads_is_split_too(tmp_path, monkeypatch, weights):
    model, losses, sizes = _spoiled(), {}, {}
    with torch.no_grad():
        model.model.norm.weight[3::32] *= 100
        model.lm_head.weight[:, 3::32] /= 100
        for matrix in [one for one in model.parameters() if one.dim() == 2] if weights == "keep" else []:
            steps = matrix.reshape(len(matrix), -1, 32).abs().amax(2, keepdim=True) / 127
            matrix.copy_((matrix.reshape(len(matrix), -1, 32) / steps).round().mul(steps).reshape(matrix.shape))
    for name, share in (("rows", 10**6), ("channels", 32)):
        monkeypatch.setattr(rounding, "_SHARE", share)
        path = tmp_path / f"{name}.onnx"
        kinds, report = _written(model, path, weights, "split")
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
        (2e-2, 4e-4, None, "parts"),  # above 1.01, which is allowed: before a matrix is put into full
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
    assert (kinds.count("MatMulNBits"), kinds.count("MatMul")) == (1, 0)
    assert done.report.quality.divergence == {"parts": parted, "exact": exact, "whole": whole}[kind]


BY_TOKEN = Quantization("int8", activations="token")


@pytest.mark.parametrize("shape", [(5, 96), (2, 5, 96)], ids=["Gemm", "MatMul"])
def test_products_are_near_those_in_float_and_cannot_overflow_the_sums_of_other_processors(tmp_path, shape):
    """Without VNNI two products of a byte and a weight are added in 16 bits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = {"inner": torch.nn.Linear(96, 96, bias=False), "outer": torch.nn.Linear(96, 40)}
        module = module_of(lambda self, x: self.outer(torch.relu(self.inner(self.inner(x)))), **parts)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, shape[-2])[:, None]
    x[..., 1, :] = 0  # as a token of padding can be
    free = (dict.fromkeys(range(len(shape) - 1), torch.export.Dim.DYNAMIC),)
    exported = export_onnx(module, (x,), path=tmp_path / "m.onnx", dynamic_shapes=free, quantize=BY_TOKEN)
    assert exported.report.quality.block_size == 0
    found = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x.numpy()})[0]
    wanted, bias = module(x).detach().numpy(), module.outer.bias.detach().numpy()
    assert numpy.isfinite(found).all()
    assert numpy.allclose(found[..., 1, :], bias, atol=1e-6)
    apart = numpy.linalg.norm(found - wanted, axis=-1) / numpy.linalg.norm(wanted - bias + 1e-12, axis=-1)
    assert numpy.delete(apart, 1, axis=-1).max() < 0.05
    graph = ir.load(tmp_path / "m.onnx").graph
    operators = [node.op_type for node in graph]
    assert operators.count("MatMulIntegerToFloat") == 3
    assert not {"MatMul", "Gemm", "MatMulNBits"} & set(operators)
    held = [value.const_value.numpy() for value in graph.initializers.values()]
    stored = [one for one in held if one.dtype == numpy.int8]
    assert len(stored) == 2  # the matrix of two products is in the file once
    assert all(2 * 255 * int(numpy.abs(one.astype(int)).max()) < 2**15 for one in stored)
    assert all(len(numpy.unique(one)) > 60 for one in stored)


def test_channels_make_large_ones_smaller_and_leave_the_product_as_it_is():
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 32, generator=draw, dtype=torch.float64), torch.randn(32, 8, generator=draw).double()
    x[:, 3] *= 100
    channels = _channels(x.T @ x / 64, [weight.abs().amax(1)])
    assert torch.allclose((x / channels) @ (weight * channels[:, None]), x @ weight)
    assert float((x / channels).abs().max() / x.abs().max()) < 0.2
    assert math.isclose(float(channels.log().mean()), 0, abs_tol=1e-6)
    assert torch.equal(_channels(torch.zeros(4, 4), [torch.zeros(4)]), torch.ones(4))


def test_seven_bits_share_one_zero_and_lose_less_than_rounding_to_nearest():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(512, 96, generator=draw) @ torch.randn(96, 96, generator=draw)
    weight = torch.randn(96, 24, generator=draw)
    grid = round_with_feedback(weight, x.T @ x / 512, 96, torch.float32, 7)
    assert grid.zeros is None
    assert grid.middle == 64
    assert grid.numbers.shape == (24, 1, 96)
    assert int(grid.numbers.max()) <= 127
    steps = weight.abs().amax(0) / 63
    nearest = (weight / steps).round() * steps
    lost = [float((x @ (one - weight)).square().mean()) for one in (torch.from_numpy(grid.weights()).T, nearest)]
    assert lost[0] < 0.7 * lost[1]


def _tokenizer(folder, words=96):
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *map(chr, range(33, 33 + words - 4))]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # characters
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A folder of sentence-transformers, and its model."""
    folder = tmp_path_factory.mktemp("sentences") / "bert"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertModel(BertConfig(vocab_size=96, max_position_embeddings=80, **sizes)).eval()
    for layer in model.encoder.layer:
        layer.output.LayerNorm.weight.data[[3, 40]] = 8
    model.save_pretrained(folder)
    _tokenizer(folder)
    parts = enumerate({"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}.items())
    kind = "sentence_transformers.models."
    modules = [{"idx": n, "name": str(n), "path": path, "type": kind + part} for n, (part, path) in parts]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return folder, model


def test_a_folder_of_an_encoder_states_the_cosine_of_its_embeddings(bert, tmp_path):
    folder, model = bert
    done = export_folder(folder, tmp_path / "out", quantize="int8")
    stated = done.reports["model.onnx"].quality
    assert stated.block_size == 0
    assert 0.995 <= stated.cosine < 1
    assert f"a cosine of {stated.cosine:.5f} or more, allowed 0.995" in str(stated)
    assert "16 sentences" in [case.case for case in done.reports["model.onnx"].cases]
    ids = torch.randint(4, 96, (20, 30), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[::2, 20:] = 0
    feeds = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "token_type_ids": torch.zeros_like(ids).numpy()}
    session = onnxruntime.InferenceSession(tmp_path / "out/model.onnx")
    found = torch.from_numpy(session.run(["sentence_embedding"], feeds)[0])
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    assert float((found * torch.nn.functional.normalize(mean, dim=1)).sum(1).min()) > 0.99
    verified = verify_folder(tmp_path / "out")
    assert verified.ok
    assert math.isclose(verified.checks[0].quality.cosine, stated.cosine, abs_tol=1e-4)


def test_an_encoder_that_loses_too_much_gets_blocks_or_is_refused_with_what_to_type(bert, tmp_path, monkeypatch):
    folder, _ = bert
    monkeypatch.setattr(quantized, "_NEAR", 0.0)
    done = export_folder(folder, tmp_path / "blocks", quantize="int8")
    assert done.reports["model.onnx"].quality.block_size == 32
    assert done.verified.ok
    monkeypatch.undo()
    monkeypatch.setattr(quality, "_COSINE", 1.0)
    with pytest.raises(ReplayError, match=r"Leave activations=\"token\" \(--activations token\) out"):
        export_folder(folder, tmp_path / "out", quantize=BY_TOKEN)
    with pytest.raises(ReplayError, match=r"--dtype float16"):
        export_folder(folder, tmp_path / "out", quantize="int8")
    assert not (tmp_path / "out").exists()


def test_a_tied_head_stays_in_blocks(tmp_path):
    """The embedding reads the same table."""
    model = copy.deepcopy(small_model("llama"))
    model.config.tie_word_embeddings = True
    model.tie_weights()
    export_folder(model, tmp_path / "out", quantize=BY_TOKEN)
    operators = [node.op_type for node in ir.load(tmp_path / "out/model.onnx").graph]
    assert operators.count("MatMulIntegerToFloat") == 14
    assert verify_folder(tmp_path / "out").ok


@pytest.mark.parametrize("kind", ["Albert", "Roberta"])
def test_layers_that_share_weights_or_count_positions_from_two(tmp_path, kind):
    """All layers of ALBERT multiply with the same matrices; the positions of RoBERTa begin behind its padding."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(vocab_size=96, max_position_embeddings=80, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path / "model")
    _tokenizer(tmp_path / "model")
    done = export_folder(tmp_path / "model", tmp_path / "out", quantize="int8")
    assert done.verified.ok
    assert done.reports["model.onnx"].quality.block_size == 0
    assert done.reports["model.onnx"].quality.relative_difference < 0.03
