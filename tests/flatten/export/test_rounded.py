"""Matrices in 8 bits: no further from the weights than half a step, and tables of embeddings among them."""

import numpy
import onnx
import onnxruntime
import pytest
import torch
from transformers import BertConfig, BertModel

from yobx_flatten import export_onnx
from yobx_flatten.export.quantization import Quantization


class Reader(torch.nn.Module):
    def __init__(self, words, scale=1.0):
        super().__init__()
        self.table = torch.nn.Embedding(words, 64)
        self.head = torch.nn.Linear(64, 64)
        with torch.no_grad():
            self.table.weight.mul_(scale)

    def forward(self, ids):
        return self.table(ids), self.head(self.table(ids))


def _initializers(path):
    graph = onnx.load(path).graph
    return graph, {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}


def _encoder():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(**sizes, vocab_size=1200, max_position_embeddings=64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertModel(config, add_pooling_layer=False).eval()


def test_an_encoder_is_a_quarter_of_its_size_and_keeps_its_embeddings(tmp_path):
    """The table of the words is most of it, and is in 8 bits; embeddings of sentences stay where they are."""
    model, path = _encoder(), tmp_path / "m.onnx"
    ids = torch.randint(0, 1200, (8, 12), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    report = export_onnx(model, kwargs=given, path=path, quantize="int8").report
    assert any("embedding tables, in int8" in remark for remark in report.remarks)
    assert path.stat().st_size < 0.3 * sum(weight.nbytes for weight in model.parameters()) + 60_000
    found = onnxruntime.InferenceSession(path).run(None, {name: value.numpy() for name, value in given.items()})[0]
    with torch.no_grad():
        expected = model(**given).last_hidden_state.mean(1)
    cosines = torch.nn.functional.cosine_similarity(torch.from_numpy(found).mean(1), expected)
    assert float(cosines.min()) >= 0.995


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_a_table_is_within_half_a_step(tmp_path, scale):
    """Of 127 steps for the largest of its block; scales below what float16 holds are in float32."""
    model, path, ids = Reader(1100, scale).eval(), tmp_path / "m.onnx", torch.arange(1100).reshape(10, 110)
    report = export_onnx(model, (ids,), path=path, cases=[], quantize="int8").report
    assert any("embedding tables, in int8" in remark for remark in report.remarks)
    assert path.stat().st_size < 0.3 * sum(weight.nbytes for weight in model.parameters()) + 6_000
    rows = onnxruntime.InferenceSession(path).run(None, {"ids": ids.numpy()})[0].reshape(1100, 64)
    weight = model.table.weight.detach().numpy()
    step = numpy.abs(weight).max(1) / 127
    assert bool((numpy.abs(rows - weight).max(1) <= 0.51 * step).all())
    _, held = _initializers(path)
    (scales,) = [value for name, value in held.items() if name.startswith("table") and name.endswith("scales")]
    assert scales.dtype == (numpy.float16 if scale == 1.0 else numpy.float32)


def test_rows_that_are_no_whole_blocks_are_filled(tmp_path):
    """The identity reads the weights of a projection of 80 inputs out."""
    linear = torch.nn.Linear(80, 48, bias=False)
    found, weight = _read_out(tmp_path / "m.onnx", linear, 32), linear.weight.detach().numpy()
    blocks = [weight[:, start : start + 32] for start in (0, 32, 64)]
    step = numpy.concatenate([numpy.repeat(numpy.abs(b).max(1, keepdims=True) / 127, b.shape[1], 1) for b in blocks], 1)
    assert bool((numpy.abs(found - weight) <= 0.51 * step + 1e-6).all())


def _read_out(path, linear, block_size):
    """The weights that a file multiplies with, by the identity, which rounding to 8 bits keeps."""
    eye, how = torch.eye(linear.in_features), Quantization("int8", block_size=block_size)
    export_onnx(linear, (eye,), path=path, cases=[], quantize=how, dynamic_shapes=None)
    return onnxruntime.InferenceSession(path).run(None, {"input": eye.numpy()})[0].T


@pytest.mark.parametrize("most", [1.0, 1e6])
@pytest.mark.parametrize("block", [32, 64])
def test_weights_are_stored_in_steps_from_zero(tmp_path, most, block):
    linear = torch.nn.Linear(256, 96, bias=False)
    with torch.no_grad():
        linear.weight.copy_(most * torch.randn(96, 256, generator=torch.Generator().manual_seed(0)))
    found, weight = _read_out(tmp_path / "m.onnx", linear, block), linear.weight.detach().numpy()
    step = numpy.repeat(numpy.abs(weight).reshape(96, -1, block).max(2) / 127, block, 1)
    assert bool((numpy.abs(found - weight) <= 0.51 * step).all())
    _, held = _initializers(tmp_path / "m.onnx")
    assert [value.shape for name, value in held.items() if name.endswith("scales")] == [(96, 256 // block)]
    assert not [name for name in held if name.endswith("zero_points")]


def test_a_small_table_stays_as_it_is(tmp_path):
    """Nothing is gained by a few thousand weights."""
    ids, path = torch.zeros(2, 5, dtype=torch.int64), tmp_path / "m.onnx"
    export_onnx(Reader(100), (ids,), path=path, cases=[], quantize="int8")
    graph, held = _initializers(path)
    assert not [node for node in graph.node if node.op_type == "GatherBlockQuantized"]
    assert any(value.dtype == numpy.float32 and value.shape == (100, 64) for value in held.values())
