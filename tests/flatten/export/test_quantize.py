"""Files with weights in 8 and 4 bits: as small as they should be, and as close to the model as rounding allows."""

import heapq
import logging
import math
import os
import sys

import onnx
import onnxruntime
import pytest
import torch

from tests import fresh_process
from tests.flatten.export.trained_model import logits_of, text_of, trained_model
from yobx_flatten import Case, DecodeSizes, Quantization, decode_inputs, export_onnx, export_program
from yobx_flatten.errors import InvalidArgumentError, MissingDependencyError, ReplayError
from yobx_flatten.export import quantization as quantizing
from yobx_flatten.export.proof.quality import Distance, text_losses
from yobx_flatten.export.runtimes.write import has_kernels
from yobx_flatten.model_folder.source.configuration import small_model


def _held_out(rows: int = 4) -> torch.Tensor:
    return text_of(heapq)[: rows * 96].reshape(rows, 96)


def _exported(path, quantize, **options):
    model = trained_model()
    inputs = decode_inputs(model, DecodeSizes(batch=2, past=5, new=3))
    longer = Case("past 20", (), decode_inputs(model, DecodeSizes(3, 20, 1, padding=2)), steps=3)
    return export_onnx(model, kwargs=inputs, path=path, cases=[longer], steps=2, quantize=quantize, **options)


def _stored(path) -> dict[str, tuple[int, int]]:
    graph = onnx.load(path).graph
    sizes = {tensor.name: len(tensor.raw_data) for tensor in graph.initializer}
    sizes |= {
        node.output[0]: sizes[node.input[0]] for node in graph.node if node.op_type == "Cast" and node.input[0] in sizes
    }
    found = {}
    for number, node in enumerate(graph.node):
        if node.op_type == "MatMulNBits":
            shape = {a.name: a.i for a in node.attribute}
            found[f"{number}"] = sum(sizes[name] for name in node.input[1:]), 4 * shape["K"] * shape["N"]
    return found


def _contents(path):
    graph = onnx.load(path).graph
    return [(node.op_type, *node.input) for node in graph.node], {w.name: w.raw_data for w in graph.initializer}


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"quantize": "int4", "optimize": "onnxruntime"}])
def test_a_program_writes_the_file_that_export_onnx_writes(tmp_path, options):
    model = trained_model()
    how = {"kwargs": decode_inputs(model, DecodeSizes(batch=2, past=5, new=3)), "cases": [], "steps": 2}
    straight = export_onnx(model, path=tmp_path / "straight.onnx", **how, **options).report
    report = export_program(model, **how).to_onnx(tmp_path / "program.onnx", **options)
    assert _contents(tmp_path / "program.onnx") == _contents(tmp_path / "straight.onnx")
    assert (report.quality, report.operators) == (straight.quality, straight.operators)


@pytest.mark.parametrize(("weights", "allowed", "bytes_each"), [("int8", 1.005, 0.29), ("int4", 1.03, 0.2)])
def test_a_trained_model_keeps_its_perplexity(tmp_path, weights, allowed, bytes_each):
    tokens, path = _held_out(), tmp_path / "model.onnx"
    exported = _exported(path, Quantization(weights, tokens=tokens))
    stored = _stored(path)
    assert len(stored) == 2 * 7 + 1
    assert sum(size for size, _ in stored.values()) <= bytes_each * sum(full for _, full in stored.values())
    assert exported.report.onnx_bytes == os.path.getsize(path)
    # the perplexity again, of all tokens but the first of each row, without any of our own code
    with torch.no_grad():
        both = logits_of(path, tokens), trained_model()(input_ids=tokens).logits
    read = tokens[:, 2:].flatten()
    losses = [torch.nn.functional.cross_entropy(scores[:, 1:-1].flatten(0, 1), read) for scores in both]
    quality = exported.report.quality
    assert float(losses[1].exp()) < 80  # of 259: it has learned
    assert 1 / allowed < float((losses[0] - losses[1]).exp()) < allowed
    assert quality.perplexity == pytest.approx(float(losses[0].exp()), rel=1e-5)  # the first token is also the file's
    assert quality.model_perplexity == pytest.approx(float(losses[1].exp()), rel=1e-3)
    assert quality.text_tokens == 4 * 94
    assert quality.ok
    assert quality.agreement > 0.8


def test_a_file_that_is_too_far_from_its_model_is_not_written(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_text("before")
    message = r'(?s)differs more from the eager.*perplexity ratio.*quantize="int8"'
    with pytest.raises(ReplayError, match=message) as found:
        _exported(path, Quantization("int4", block_size=128, perplexity_ratio=1.0000001))
    assert path.read_text() == "before"
    assert not found.value.report.ok
    assert found.value.report.max_difference <= found.value.report.tolerance  # of the float file: it is the rounding


def test_a_weight_that_is_also_an_embedding_is_stored_once_and_named(tmp_path):
    model = small_model("gpt2")
    inputs = decode_inputs(model, DecodeSizes())
    report = export_onnx(model, kwargs=inputs, path=tmp_path / "gpt2.onnx", cases=[], steps=2, quantize="int8").report
    assert any(remark.startswith("lm_head.weight is in the file once") for remark in report.remarks)
    graph = onnx.load(tmp_path / "gpt2.onnx").graph
    assert sum(node.op_type == "MatMulNBits" for node in graph.node) == 9
    assert not [node.op_type for node in graph.node if node.op_type == "Gemm"]
    assert "lm_head.weight" not in {tensor.name for tensor in graph.initializer}
    assert sum(node.op_type == "GatherBlockQuantized" for node in graph.node) == 1
    assert report.quality.divergence < 0.01


def test_products_of_other_modules_are_compared_by_their_outputs(tmp_path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 8)).eval()
        x = torch.randn(5, 64)
    report = export_onnx(module, (x,), path=tmp_path / "m.onnx", cases=[], quantize="int4").report
    assert report.quality.perplexity_ratio is None
    assert report.quality.agreement is None
    assert 0.001 < report.quality.relative_difference < 0.3
    graph = onnx.load(tmp_path / "m.onnx").graph
    kinds = [node.op_type for node in graph.node if node.op_type in ("MatMulNBits", "Gemm", "MatMul")]
    assert sorted(kinds) == ["Gemm", "MatMulNBits"]


def test_quantised_weights_are_those_of_the_model_up_to_half_a_step(tmp_path):
    """A step of 4 bits is a fifteenth of the range of 32 weights; the identity reads them out."""
    linear = torch.nn.Linear(64, 40, bias=False)
    x = torch.eye(64)
    export_onnx(linear, (x,), path=tmp_path / "m.onnx", cases=[], quantize="int4", dynamic_shapes=None)
    found = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"input": x.numpy()})[0]
    blocks = linear.weight.detach().reshape(40, 2, 32)
    step = (blocks.amax(-1).clamp(min=0) - blocks.amin(-1).clamp(max=0)) / 15
    apart = (torch.from_numpy(found).T.reshape(40, 2, 32) - blocks).abs()
    assert bool((apart <= 1.01 * step[..., None]).all())  # an end may be a step off: a zero point is a whole number
    assert float(apart.mean()) < 0.3 * float(step.mean())


def test_what_cannot_be_quantised_is_refused_before_anything_is_traced(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.export, "export", None)
    linear, x, path = torch.nn.Linear(64, 64), torch.ones(2, 64), tmp_path / "m.onnx"
    with pytest.raises(InvalidArgumentError, match=r'quantize must be None, "int8", "int4", .*found \'int3\''):
        export_onnx(linear, (x,), path=path, quantize="int3")
    with pytest.raises(InvalidArgumentError, match="found the int 4"):
        export_onnx(linear, (x,), path=path, quantize=4)
    with pytest.raises(InvalidArgumentError, match=r"ReLU has none\. Leave quantize out"):
        export_onnx(torch.nn.ReLU(), (x,), path=path, quantize="int4")
    with pytest.raises(InvalidArgumentError, match=r"float64 weights.*model\.float\(\)"):
        export_onnx(torch.nn.Linear(64, 64).double(), (x.double(),), path=path, quantize="int4")
    with pytest.raises(InvalidArgumentError, match="cannot read the text of tokens=, since Linear is not"):
        export_onnx(linear, (x,), path=path, quantize=Quantization(tokens=torch.ones(2, 5, dtype=torch.int64)))
    with pytest.raises(InvalidArgumentError, match="its vocabulary has 259 tokens, and the text contains tokens 259"):
        _exported(path, Quantization(tokens=torch.full((1, 8), 259)))
    assert list(tmp_path.iterdir()) == []


def test_an_onnxruntime_without_its_quantizer_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime.quantization", None)
    quantizing._library.cache_clear()
    try:
        with pytest.raises(MissingDependencyError, match=r"cannot be imported(?s:.*)pip install --upgrade onnxruntime"):
            export_onnx(torch.nn.Linear(64, 64), (torch.ones(2, 64),), quantize="int4")
    finally:
        quantizing._library.cache_clear()


def test_the_quantizer_leaves_logging_as_it_is():
    """Its module calls basicConfig when it is imported; an application's own handlers stay alone."""
    code = (
        "import logging; from yobx_flatten.export.quantization import Quantization; import numpy;"
        "Quantization().quantize(numpy.ones((32, 32), numpy.float32));"
        "assert logging.getLogger().handlers == [] and logging.getLogger().level == logging.WARNING"
    )
    fresh_process.run("-c", code)
    assert logging.getLogger("onnxruntime.quantization").level in (logging.NOTSET, logging.WARNING)


def test_distances_are_those_that_are_written_out_and_outputs_without_scores_are_compared_by_size():
    """A uniform distribution has the perplexity of its vocabulary."""
    expected = torch.tensor([[[2.0, 0.0], [0.0, 1.0]]])
    found = torch.tensor([[[2.0, 1.0], [0.5, 0.25]]])
    quality = measured({"logits": expected}, {"logits": found})
    assert quality.max_difference == 1.0
    assert quality.mean_difference == pytest.approx((1 + 0.5 + 0.75) / 4)
    assert (quality.positions, quality.agreement) == (2, 0.5)
    p, q = expected.softmax(-1), found.softmax(-1)
    assert quality.divergence == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-5)
    assert quality.perplexity_ratio == pytest.approx(2.718281828**quality.divergence, rel=1e-5)
    assert not quality.ok
    of_padding = measured({"logits": torch.zeros(1, 2, 5)}, {"logits": torch.ones(1, 2, 5)})
    assert (of_padding.positions, of_padding.agreement, of_padding.divergence, of_padding.ok) == (0, None, None, True)
    losses = text_losses(torch.zeros(1, 4, 7), torch.tensor([[1, 2, 3, 4]]))["losses"]
    assert losses.shape == (1, 3)
    assert float(losses.mean().exp()) == pytest.approx(7)
    ints, empty = torch.tensor([1, 2]), torch.zeros(0)
    expected = {"hidden": torch.tensor([3.0, 4.0]), "ids": ints, "empty": empty}
    quality = measured(expected, {"hidden": torch.tensor([3.0, 5.0]), "ids": ints + 1, "empty": empty})
    assert (quality.max_difference, quality.mean_difference) == (1, 0.5)
    assert quality.relative_difference == pytest.approx(math.sqrt(1 / (0.5**2 + 0.5**2)))
    assert (quality.agreement, quality.perplexity_ratio) == (None, None)
    assert str(quality) == "int8, one scale per output: max difference 1.0e+00; mean 5.0e-01, 141.4% of the outputs"
    same = measured(expected, expected)
    assert (same.ok, same.relative_difference) == (True, 0)
    infinite = measured({"hidden": torch.ones(2)}, {"hidden": torch.tensor([1.0, math.nan])})
    assert (infinite.ok, infinite.max_difference) == (False, math.inf)


def test_weights_without_kernels_are_refused_before_the_export_and_stay_a_program(tmp_path, monkeypatch):
    assert has_kernels("float16")
    assert not has_kernels("bfloat16")
    module, x = torch.nn.Linear(3, 4).bfloat16(), torch.ones(2, 3, dtype=torch.bfloat16)
    exported = export_program(module, (x,), cases=[])
    with pytest.raises(InvalidArgumentError, match=r'(?s)to_onnx: onnxruntime has no kernels.*proof="none"'):
        exported.to_onnx(tmp_path / "m.onnx")
    monkeypatch.setattr(torch.export, "export", None)
    with pytest.raises(InvalidArgumentError, match=r'(?s)no kernels for weights of bfloat16.*proof="none"'):
        export_onnx(module, (x,), path=tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def measured(expected, found):
    distance = Distance()
    distance.add(expected, found)
    return distance.quality("int8", 0, 1.01)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "int3"}, r'weights must be "int8", "int4" or "keep", found \'int3\''),
        ({"block_size": 33}, "block_size must be one of 16, 32"),
        ({"perplexity_ratio": 0.9}, r"must be a number above 1, found 0\.9"),
        ({"tokens": [1, 2, 3]}, "list"),
        ({"tokens": torch.ones(2, 5)}, r"found float32 of shape \(2, 5\)"),
        ({"calibration": torch.ones(2, 5)}, r"calibration must be int64 of shape \(texts, length\)"),
        ({"activations": "int4"}, 'activations must be "auto", "float", "int8", "split" or "token", found \'int4\''),
        ({"activations": "token", "weights": "int4"}, 'activations="token" needs weights="int8", found \'int4\''),
        ({"activations": "token", "weights": "int8", "block_size": 64}, "one scale for all weights .* block_size=64"),
    ],
)
def test_options_that_are_none_or_exclude_each_other_are_named(options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        Quantization(**options)
