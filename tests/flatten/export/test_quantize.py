"""Files with weights in 8 and 4 bits: as small as they should be, and as close to the model as rounding allows."""

import copy
import dataclasses
import heapq
import itertools
import logging
import math
import os
import statistics
import sys

import numpy
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from tests import fresh_process
from tests.flatten.export.trained_model import logits_of, text_of, trained_model
from yobx_flatten import Case, Quantization, decode_inputs, export_onnx, export_program, register_flattening_functions
from yobx_flatten.errors import InvalidArgumentError, MissingDependencyError, ReplayError
from yobx_flatten.export import quantization as quantizing
from yobx_flatten.export.onnx.file import UnprovenFile
from yobx_flatten.export.onnx.rounding import input_moments, round_with_feedback
from yobx_flatten.export.proof.quality import Distance, Quality, text_losses
from yobx_flatten.export.quantization import Role, find_bits, from_the_start, text_cases
from yobx_flatten.export.runtimes.write import has_kernels
from yobx_flatten.huggingface import DecodeSizes
from yobx_flatten.model_folder.source.configuration import small_model
from yobx_flatten.runners.ports import CacheSlot, Port


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
    with pytest.raises(InvalidArgumentError, match="cannot be run on the token ids in tokens=, since Linear is not"):
        export_onnx(linear, (x,), path=path, quantize=Quantization(tokens=torch.ones(2, 5, dtype=torch.int64)))
    with pytest.raises(InvalidArgumentError, match="its vocabulary has 259 tokens, and tokens= contains ids 259"):
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


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_a_table_is_within_half_a_step_and_a_small_one_stays_as_it_is(tmp_path, scale):
    """Nothing is gained by a few thousand weights."""
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
    export_onnx(Reader(100), (ids[:1] % 100,), path=path, cases=[], quantize="int8")
    graph, held = _initializers(path)
    assert not [node for node in graph.node if node.op_type == "GatherBlockQuantized"]
    assert any(value.dtype == numpy.float32 and value.shape == (100, 64) for value in held.values())


def _read_out(path, linear, block_size):
    """The weights that a file multiplies with, by the identity, which rounding to 8 bits keeps."""
    eye, how = torch.eye(linear.in_features), Quantization("int8", block_size=block_size)
    export_onnx(linear, (eye,), path=path, cases=[], quantize=how, dynamic_shapes=None)
    return onnxruntime.InferenceSession(path).run(None, {"input": eye.numpy()})[0].T


@pytest.mark.parametrize("most", [1.0, 1e6])
@pytest.mark.parametrize(("width", "block"), [(256, 32), (256, 64), (80, 32)])  # the last has no whole blocks
def test_weights_are_stored_in_steps_from_zero(tmp_path, most, width, block):
    linear = torch.nn.Linear(width, 96, bias=False)
    with torch.no_grad():
        linear.weight.copy_(most * torch.randn(96, width, generator=torch.Generator().manual_seed(0)))
    found, weight = _read_out(tmp_path / "m.onnx", linear, block), linear.weight.detach().numpy()
    blocks = numpy.pad(weight, ((0, 0), (0, -width % block))).reshape(96, -1, block)
    step = numpy.repeat(numpy.abs(blocks).max(2) / 127, block, 1)[:, :width]
    assert bool((numpy.abs(found - weight) <= 0.51 * step + 1e-6 * most).all())
    _, held = _initializers(tmp_path / "m.onnx")
    assert [value.shape for name, value in held.items() if name.endswith("scales")] == [(96, blocks.shape[1])]
    assert not [name for name in held if name.endswith("zero_points")]


def _inputs(count: int, size: int, rank: int) -> torch.Tensor:
    """Inputs that mostly go together, as those of a model do."""
    draw = torch.Generator().manual_seed(3)
    mixed = torch.randn(count, rank, generator=draw) @ torch.randn(rank, size, generator=draw)
    return mixed + 0.1 * torch.randn(count, size, generator=draw)


def _weights(size: int, columns: int) -> torch.Tensor:
    return torch.randn(size, columns, generator=torch.Generator().manual_seed(5))


def _nearest(weights: torch.Tensor, size: int) -> torch.Tensor:
    """Whole steps of a fifteenth of a block's range, with a whole number for 0: written out again."""
    blocks = weights.reshape(-1, size, weights.shape[1])
    low, high = blocks.amin(1, keepdim=True).clamp(max=0), blocks.amax(1, keepdim=True).clamp(min=0)
    step = (high - low) / 15
    zero = torch.round(-low / step)
    return ((torch.round(blocks / step) + zero).clamp(0, 15) - zero).mul(step).reshape(weights.shape)


def _loss(inputs: torch.Tensor, weights: torch.Tensor, found: torch.Tensor) -> float:
    return float((inputs @ (weights - found)).square().mean())


@pytest.mark.parametrize("rank", [4, 16, 64])
def test_products_change_less_than_with_rounding_to_nearest(rank):
    inputs, weights = _inputs(4096, 128, rank), _weights(128, 48)
    seen, others = inputs[:2048], inputs[2048:]
    found = torch.from_numpy(round_with_feedback(weights, seen.T @ seen / 2048, 32).weights()).T
    allowed = {4: 0.15, 16: 0.3, 64: 0.75}[rank]
    assert _loss(others, weights, found) < allowed * _loss(others, weights, _nearest(weights, 32))


def test_the_numbers_are_near_the_best_of_all():
    inputs, columns = _inputs(512, 16, 2)[:, :4], 24
    weights, moments = _weights(4, columns), inputs.T @ inputs / len(inputs)
    grid = round_with_feedback(weights, moments, 4)
    assert grid.lowest is None
    choices = torch.tensor(list(itertools.product(range(16), repeat=4)), dtype=torch.float32)
    gaps = torch.zeros(2)
    for column, found in enumerate(grid.weights()):
        zero, scale = float(grid.zeros[column, 0]), float(grid.scales[column, 0])
        own = weights[:, column]
        nearest = ((own / scale).round() + zero).clamp(0, 15)
        errors = torch.cat([choices, nearest[None]]).sub(zero).mul(scale) - own
        losses = ((errors @ moments) * errors).sum(1)
        error = torch.from_numpy(found) - own
        reached, best = float(error @ moments @ error), float(losses[:-1].min())
        assert reached >= best - 1e-6
        gaps += torch.tensor([reached - best, float(losses[-1]) - best])
    assert gaps[0] < 0.4 * gaps[1]


def test_inputs_that_say_nothing_leave_rounding_to_nearest_steps():
    weights = _weights(64, 40)
    grid = round_with_feedback(weights, torch.eye(64), 32)
    scales, zeros = (numpy.repeat(one.astype(numpy.float32), 32, 1) for one in (grid.scales, grid.zeros))
    expected = (numpy.rint(weights.numpy().T / scales) + zeros).clip(0, 15)
    assert (grid.numbers.reshape(40, 64) == expected).all()


def test_weights_near_a_lowest_weight_and_steps_keep_them():
    """Weights of Q4_1, moved by a two thousandth each: a whole number for 0 would cost 30 times as much."""
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 16, (8, 32, 24), generator=draw).float()
    numbers[:, 0], numbers[:, 1] = 0, 15
    exact = (numbers * 0.013 - 0.07 - torch.rand(8, 1, 24, generator=draw) * 0.02).reshape(256, 24)
    weights = exact * (1 + (torch.rand(256, 24, generator=draw) - 0.5) * 1e-3)
    inputs = _inputs(1024, 256, 32)
    grid = round_with_feedback(weights, inputs.T @ inputs / 1024, 32)
    assert grid.lowest is not None
    assert grid.lowest.dtype == numpy.float16
    assert float(numpy.abs(grid.weights().T - weights.numpy()).max()) < 0.05 * 0.013


@pytest.mark.parametrize(
    "moments",
    [torch.zeros(32, 32), torch.full((32, 32), 2.0), torch.full((32, 32), float("inf")), torch.eye(32) * 1e-20],
    ids=["zeros", "all the same", "infinite", "tiny"],
)
def test_moments_without_an_inverse_give_finite_weights(moments):
    weights = _weights(32, 8)
    found = round_with_feedback(weights, moments, 32).weights().T
    assert bool((numpy.abs(found - weights.numpy()) <= numpy.ptp(weights.numpy(), 0)).all())
    assert not round_with_feedback(torch.zeros(32, 8), moments, 32).weights().any()


def _text(module, rows: int) -> torch.Tensor:
    return text_of(module)[: rows * 96].reshape(rows, 96)


def _exported_blocks(path, dtype=torch.float32, **options):
    model = copy.deepcopy(trained_model()).to(dtype)
    inputs = decode_inputs(model, DecodeSizes(batch=2, past=5, new=3))
    return model, inputs, export_onnx(model, kwargs=inputs, path=path, cases=[], steps=2, **options)


def _divergence(path, tokens: torch.Tensor) -> float:
    """Mean divergence of the file's scores from the model's, in nats, without any code of ours."""
    found = logits_of(path, tokens).double().log_softmax(-1)
    with torch.no_grad():
        wanted = trained_model()(input_ids=tokens).logits.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


def test_the_moments_are_those_of_what_modules_receive(tmp_path):
    path = tmp_path / "m.onnx"
    model, inputs, _ = _exported_blocks(path)
    seen: dict[int, list[torch.Tensor]] = {}

    def keep(module, given):
        seen.setdefault(id(module), []).append(given[0].detach().flatten(0, 1))

    tokens = _text(heapq, 5)
    linears = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    hooks = [part.register_forward_pre_hook(keep) for part in linears]
    with torch.no_grad():
        model(input_ids=tokens)
    for hook in hooks:
        hook.remove()
    expected = [torch.cat(seen[id(part)]) for part in linears]
    assert {len(rows) for rows in expected} == {5 * 96}
    products = [node for node in ir.load(path).graph if node.op_type == "MatMul" and node.inputs[1].is_initializer()]
    sizes = {node.inputs[0].name: node.inputs[1].const_value.shape[0] for node in products}
    file = UnprovenFile(path, tmp_path)
    names = [node.name for node in ir.load(path).graph.inputs if not node.is_initializer()]
    calls = text_cases(model, inputs, tokens)
    with register_flattening_functions(patch_transformers=True):
        found = dict(input_moments(file, sizes, calls, names, tokens))
    assert len(found) == 2 * 4 + 1 == len(sizes)
    for rows in expected:
        rows = rows / rows.square().mean(1, keepdim=True).sqrt()
        wanted = rows.T @ rows / len(rows)
        near = [float((one - wanted).abs().max()) for one in found.values() if one.shape == wanted.shape]
        assert min(near) < 1e-4 * float(wanted.abs().max())
    assert [one.name for one in tmp_path.iterdir()] == ["m.onnx"]


def test_calls_with_other_inputs_are_not_read_from_the_start():
    """What they are for the first token is not known, so weights are rounded to nearest then."""
    tokens = torch.ones(2, 5, dtype=torch.int64)
    feeds = {"input_ids": tokens[:, 1:], "attention_mask": tokens}
    found = from_the_start(feeds, [], tokens)
    assert found is not None
    assert found["input_ids"] is tokens
    for other in ("token_type_ids", "cache_position", "past_key_values.0.conv_states"):
        slots = [CacheSlot(Port(other, (None, 2, None), torch.float32), None)] if "." in other else []
        assert from_the_start({**feeds, other: tokens}, slots, tokens) is None


@pytest.mark.parametrize(("bits", "part"), [("int4", 0.6), ("int8", 0.8)])
def test_a_file_rounded_by_a_text_is_nearer_to_its_model(tmp_path, bits, part):
    how = {"activations": "float", "perplexity_ratio": 2.0}
    nearest = Quantization(bits, **how)
    by_text = Quantization(bits, **how, tokens=_text(heapq, 4), calibration=_text(statistics, 40))
    _exported_blocks(tmp_path / "nearest.onnx", quantize=nearest)
    *_, exported = _exported_blocks(tmp_path / "text.onnx", quantize=by_text)
    held_out = text_of(heapq)[4 * 96 : 12 * 96].reshape(8, 96)
    found = [_divergence(tmp_path / name, held_out) for name in ("text.onnx", "nearest.onnx")]
    assert found[0] < part * found[1]
    assert any("with a text" in remark for remark in exported.report.remarks)
    assert (tmp_path / "text.onnx").stat().st_size < 1.08 * (tmp_path / "nearest.onnx").stat().st_size


def test_weights_in_4_bits_multiply_in_half_precision(tmp_path):
    chosen = Quantization("int4", perplexity_ratio=2.0, tokens=_text(heapq, 4), calibration=_text(statistics, 40))
    held_out, found = text_of(heapq)[4 * 96 : 8 * 96].reshape(4, 96), []
    for dtype in (torch.float32, torch.float16):
        _exported_blocks(tmp_path / "m.onnx", dtype, quantize=chosen)
        found.append(_divergence(tmp_path / "m.onnx", held_out))
    assert found[1] < 1.2 * found[0]
    graph = onnx.load(tmp_path / "m.onnx").graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type == "MatMulNBits"]
    assert len(products) == 2 * 7 + 1
    assert {types[node.input[2]] for node in products} == {onnx.TensorProto.FLOAT16}


ROLES = {
    "up": Role("up", 2, 100, False),
    "down": Role("down", 2, 100, False),
    "o": Role("o", 2, 10, False),
    "head": Role("head", 1, 50, True),
}
COSTS = {"up": {4: 0.05, 8: 0.01}, "down": {4: 0.08, 8: 0.01}, "o": {4: 0.02, 8: 0.01}, "head": {4: 0.1, 8: 0.0}}
"""What each role adds to the logarithm of the perplexity; nothing in 32 bits."""


def _search(allowed, bits=4, worst=1.0, agreed=None):
    tried = []

    def measure(given):
        tried.append(dict(given))
        log = sum(COSTS[name].get(width, 0.0) for name, width in given.items())
        agreement = None if agreed is None else agreed[given["head"]]
        return Quality("int4", 32, 9, worst, 0.1, 0.1, agreement, None, 9, 10.0, 10.0 * math.exp(log), allowed)

    return *find_bits(ROLES, bits, measure), tried


@pytest.mark.parametrize(
    ("allowed", "agreed", "more", "count"),
    [
        (math.exp(0.151), None, ["head"], 2),  # 0.25 are 0.15 without the rounding of the head
        (1.5, None, [], 1),
        (1.5, 0.96, [], 1),
        (1.5, 0.94, ["head"], 2),  # the ratio holds, and less than 19 of 20 tokens are the model's
        # three are measured alone: 0.01 of 10 weights, then 0.07 of 100
        (math.exp(0.0701), None, ["head", "o", "down"], 7),
    ],
)
def test_the_head_is_the_first_to_get_more_bits_and_then_what_brings_most_for_its_size(allowed, agreed, more, count):
    bits, quality, tried = _search(allowed, agreed=agreed and {4: agreed, 8: 0.94})
    assert bits == dict.fromkeys(ROLES, 4) | dict.fromkeys(more, 8)
    assert (quality.ok, len(tried)) == (True, count)
    assert math.log(quality.perplexity_ratio) == pytest.approx(sum(COSTS[name][width] for name, width in bits.items()))


def test_a_model_of_integers_keeps_the_8_bits_of_its_head():
    """In 4 bits it would be within the ratio; with its own integers nothing is lost, and nothing else is tried."""
    roles = {name: dataclasses.replace(role, exact=8 if role.is_last else 4) for name, role in ROLES.items()}
    tried = []

    def measure(given):
        tried.append(dict(given))
        return Quality("int4", 32, 9, 0.1, 0.1, 0.1, 1.0, None, 9, 10.0, 10.0, 1.1)

    bits, _ = find_bits(roles, 4, measure)
    assert bits == {"up": 4, "down": 4, "o": 4, "head": 8}
    assert tried == [bits]


@pytest.mark.parametrize(("allowed", "is_ok"), [(math.exp(0.0201), True), (1 + 1e-9, False)])
@pytest.mark.parametrize("first", [4, 8])
def test_roles_stay_in_float_where_8_bits_are_not_enough_but_never_most_weights(allowed, is_ok, first):
    """0.03 in 8 bits, of which the smallest role is the cheapest third. A ratio that no file keeps is a refusal."""
    bits, quality, _ = _search(allowed, bits=first)
    assert bits == {"up": 8, "down": 8, "o": 32, "head": 32}
    assert quality.ok == is_ok
    assert len(_search(1.01, worst=math.inf)[2]) == 1  # a file that computes nothing is not searched


@pytest.mark.slow  # exports a model twice, and measures a file for each kind of matrix
def test_a_small_ratio_gets_a_larger_file_and_no_error(tmp_path):
    def exported(name, ratio):
        return _exported_blocks(tmp_path / name, quantize=Quantization("int4", perplexity_ratio=ratio))[2].report

    loose = exported("loose.onnx", 1.5)
    before = loose.quality.perplexity_ratio
    assert before > 1.0005
    strict = exported("strict.onnx", 1 + (before - 1) / 2)
    assert strict.quality.ok
    assert strict.onnx_bytes > loose.onnx_bytes
    (note,) = [remark for remark in strict.remarks if remark.startswith("stored in int8")]
    assert "lm_head (1 of 0.0332 million weights)" in note
    products = [node for node in onnx.load(tmp_path / "strict.onnx").graph.node if node.op_type == "MatMulNBits"]
    assert len(products) == 15
    assert {a.name: a.i for a in products[-1].attribute}["bits"] == 8
    assert not [remark for remark in loose.remarks if remark.startswith("stored in")]
