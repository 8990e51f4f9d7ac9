"""Products with one scale for each token and each output: next to the float product, and in files of encoders."""

import copy
import json
import math

import numpy
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from yobx_flatten import export_folder, export_onnx, verify_folder
from yobx_flatten.errors import ReplayError
from yobx_flatten.export import Quantization
from yobx_flatten.export.onnx import quantized
from yobx_flatten.export.onnx.quantized import _channels
from yobx_flatten.export.onnx.rounding import round_with_feedback
from yobx_flatten.export.proof import quality
from yobx_flatten.model_folder.source.configuration import small_model

BY_TOKEN = Quantization("int8", activations="token")


class _Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(96, 96, bias=False)
        self.outer = torch.nn.Linear(96, 40)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(self.inner(x))))


def _run(path, feeds):
    return onnxruntime.InferenceSession(path).run(None, feeds)[0]


def _layers(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _Layers().eval()


@pytest.mark.parametrize("shape", [(5, 96), (2, 5, 96)], ids=["Gemm", "MatMul"])
def test_products_are_near_those_in_float(tmp_path, shape):
    """Each token is within what 127 steps of its largest number and 64 of each output explain, whatever its size."""
    module, draw = _layers(), torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=draw) * torch.logspace(-3, 3, shape[-2])[:, None]
    x[..., 1, :] = 0  # as a token of padding can be
    free = (dict.fromkeys(range(len(shape) - 1), torch.export.Dim.DYNAMIC),)
    exported = export_onnx(module, (x,), path=tmp_path / "m.onnx", dynamic_shapes=free, quantize=BY_TOKEN)
    assert exported.report.quality.block_size == 0
    found, wanted = _run(tmp_path / "m.onnx", {"x": x.numpy()}), module(x).detach().numpy()
    bias = module.outer.bias.detach().numpy()
    assert numpy.isfinite(found).all()
    assert numpy.allclose(found[..., 1, :], bias, atol=1e-6)
    apart = numpy.linalg.norm(found - wanted, axis=-1) / numpy.linalg.norm(wanted - bias + 1e-12, axis=-1)
    assert numpy.delete(apart, 1, axis=-1).max() < 0.05
    graph = ir.load(tmp_path / "m.onnx").graph
    operators = [node.op_type for node in graph]
    assert operators.count("MatMulIntegerToFloat") == 3
    assert not {"MatMul", "Gemm", "MatMulNBits"} & set(operators)


def test_weights_cannot_overflow_the_sums_of_other_processors(tmp_path):
    """Without VNNI two products of a byte and a weight are added in 16 bits."""
    export_onnx(_layers(), (torch.randn(4, 96),), path=tmp_path / "m.onnx", quantize=BY_TOKEN)
    held = [v.const_value.numpy() for v in ir.load(tmp_path / "m.onnx").graph.initializers.values()]
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
    still = _channels(torch.zeros(4, 4), [torch.zeros(4)])
    assert torch.equal(still, torch.ones(4))


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


def _sentence_model(folder):
    """A small BERT that pools, some of whose channels are large."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertModel(BertConfig(vocab_size=96, max_position_embeddings=80, **sizes)).eval()
    for layer in model.encoder.layer:
        layer.output.LayerNorm.weight.data[[3, 40]] = 8
    model.save_pretrained(folder)
    _tokenizer(folder)
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return model


def _embeddings(model, ids, mask):
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(mean, dim=1)


def test_a_folder_of_an_encoder_states_the_cosine_of_its_embeddings(tmp_path):
    (tmp_path / "bert").mkdir()
    model = _sentence_model(tmp_path / "bert")
    done = export_folder(tmp_path / "bert", tmp_path / "out", quantize="int8")
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
    assert float((found * _embeddings(model, ids, mask)).sum(1).min()) > 0.99
    verified = verify_folder(tmp_path / "out")
    assert verified.ok
    assert math.isclose(verified.checks[0].quality.cosine, stated.cosine, abs_tol=1e-4)


def test_an_encoder_that_loses_too_much_gets_blocks(tmp_path, monkeypatch):
    (tmp_path / "bert").mkdir()
    _sentence_model(tmp_path / "bert")
    monkeypatch.setattr(quantized, "_NEAR", 0.0)
    done = export_folder(tmp_path / "bert", tmp_path / "out", quantize="int8")
    assert done.reports["model.onnx"].quality.block_size == 32
    assert done.verified.ok


def test_a_tied_head_stays_in_blocks(tmp_path):
    """The embedding reads the same table."""
    model = copy.deepcopy(small_model("llama"))
    model.config.tie_word_embeddings = True
    model.tie_weights()
    export_folder(model, tmp_path / "out", quantize=BY_TOKEN)
    operators = [node.op_type for node in ir.load(tmp_path / "out/model.onnx").graph]
    assert operators.count("MatMulIntegerToFloat") == 14
    assert verify_folder(tmp_path / "out").ok


def test_a_file_that_is_too_far_is_refused_with_what_to_type(tmp_path, monkeypatch):
    (tmp_path / "bert").mkdir()
    _sentence_model(tmp_path / "bert")
    monkeypatch.setattr(quality, "_COSINE", 1.0)
    with pytest.raises(ReplayError, match=r"Leave activations=\"token\" \(--activations token\) out"):
        export_folder(tmp_path / "bert", tmp_path / "out", quantize=BY_TOKEN)
    with pytest.raises(ReplayError, match=r"--dtype float16"):
        export_folder(tmp_path / "bert", tmp_path / "out", quantize="int8")
    assert not (tmp_path / "out").exists()


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
