"""Files that hold the integers a checkpoint had: their grid, their products, and inputs of full precision."""

import gguf
import numpy
import onnx
import onnxruntime
import pytest
import torch

from tests.modules import module_of
from yobx_flatten import InvalidArgumentError, Quality, Quantization, export_onnx
from yobx_flatten.export.onnx import quantized
from yobx_flatten.export.onnx.weights import find_grid

ROWS, COLUMNS = 40, 512


def _random(seed=0):
    return numpy.random.default_rng(seed)


def _made(levels, block, *, first, lowest=False, scales=numpy.float16, seed=0):
    """Weights of so many levels, computed in float32 as readers of such files do."""
    draw = _random(seed)
    numbers = draw.integers(0, levels, (ROWS, COLUMNS // block, block)) + first
    numbers[..., 0], numbers[..., 1] = first, levels - 1 + first  # as quantisers choose scales
    scale = draw.uniform(0.001, 0.02, (ROWS, COLUMNS // block, 1)).astype(scales).astype(numpy.float32)
    weights = numbers.astype(numpy.float32) * scale
    if lowest:
        weights = weights + draw.uniform(-0.2, 0.1, scale.shape).astype(scales).astype(numpy.float32)
    return weights.reshape(ROWS, COLUMNS)


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
@pytest.mark.parametrize(
    ("levels", "first", "lowest", "bits"),
    [
        (16, -8, False, 4),  # Q4_0 and GPTQ with symmetric integers
        (16, -3, False, 4),  # GPTQ and AWQ: each block has a whole zero point
        (16, 0, True, 4),  # Q4_1 and Q4_K: each block has a lowest weight
        (4, 0, True, 4),  # Q2_K
        (64, -32, False, 8),  # Q6_K
        (32, 0, True, 8),  # Q5_1 and Q5_K
        (255, -127, False, 8),  # Q8_0
        (256, 0, True, 8),
    ],
)
def test_the_weights_are_given_back_in_their_own_bits_and_blocks(levels, first, lowest, bits, block):
    for scales in (numpy.float16, numpy.float32):
        weights = _made(levels, block, first=first, lowest=lowest, scales=scales)
        grid = find_grid(weights)
        assert (grid.bits, grid.numbers.shape[2]) == (bits, block)
        assert grid.numbers.max() < 2**bits
        assert (grid.lowest is not None) == lowest
        apart = numpy.abs(grid.weights() - weights).reshape(-1, block).max(1)
        largest = numpy.abs(weights).reshape(-1, block).max(1)
        assert bool((apart <= largest * 2.0**-21).all())
        if scales == numpy.float16 and grid.scales.dtype == numpy.float16:
            assert apart.max() == 0
        if (levels, first, block) == (16, 0, 32):
            assert grid.scales.dtype == scales  # those of float16 stay in 16 bits


def test_weights_of_a_model_have_no_grid_and_blocks_of_one_weight_are_on_any_that_divides_the_matrix():
    weights = _random().standard_normal((ROWS, COLUMNS)).astype(numpy.float32)
    brain = torch.from_numpy(weights).bfloat16().float().numpy()
    for found in (weights, weights.astype(numpy.float16), weights.astype(numpy.float16).astype("f4"), brain):
        assert find_grid(found) is None
    for place in ((0, 0), (11, 300), (ROWS - 1, COLUMNS - 1)):
        weights = _made(16, 32, first=-8)
        assert find_grid(weights) is not None
        weights[place] += 0.001 * 0.001
        assert find_grid(weights) is None
    weights = _made(16, 32, first=0, lowest=True)
    weights[3], weights[5, :32] = 0, 0.3
    assert bool((find_grid(weights).weights() == weights).all())
    assert bool((find_grid(numpy.zeros((4, 64), numpy.float32)).weights() == 0).all())
    assert find_grid(numpy.zeros((4, 20), numpy.float32)) is None  # blocks of 16 do not divide it


def test_weights_computed_in_half_precision_are_found_to_its_rounding():
    """GPTQ in float16, also after a conversion to float32."""
    draw = _random()
    numbers = draw.integers(0, 16, (ROWS, 4, 128)) - draw.integers(0, 16, (ROWS, 4, 1))
    scales = draw.uniform(0.001, 0.02, (ROWS, 4, 1)).astype(numpy.float16)
    weights = (numbers.astype(numpy.float16) * scales).reshape(ROWS, COLUMNS)
    for given in (weights, weights.astype(numpy.float32)):
        grid = find_grid(given)
        assert (grid.bits, grid.numbers.shape[2]) == (4, 128)
        exact = (numbers * scales.astype(numpy.float64)).reshape(ROWS, COLUMNS)
        largest = numpy.abs(exact).reshape(-1, 128).max(1)
        assert bool((numpy.abs(grid.weights() - exact).reshape(-1, 128).max(1) <= largest * 2.0**-10).all())


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_library_gguf_computes_is_given_back(name):
    kind = gguf.GGMLQuantizationType[name]
    weights = _random().standard_normal((ROWS, COLUMNS)).astype(numpy.float32) * numpy.float32(0.03)
    read = gguf.dequantize(gguf.quantize(weights, kind), kind)
    grid = find_grid(numpy.ascontiguousarray(read))
    assert grid.bits == (4 if name.startswith("Q4") else 8)
    assert float(numpy.abs(grid.weights() - read).max()) <= float(numpy.abs(read).max()) * 2.0**-21


# name -> bits, block size, and where the scales of a super-block are
SUPER_BLOCKS = {
    "Q2_K": (4, 16, (-4, -2)),
    "Q3_K": (4, 16, (-2,)),
    "Q4_K": (4, 32, (0, 2)),
    "Q5_K": (8, 32, (0, 2)),
    "Q6_K": (8, 16, (-2,)),
    "IQ4_NL": (8, 32, (0,)),
    "IQ4_XS": (8, 32, (0,)),
}


@pytest.mark.parametrize("name", SUPER_BLOCKS)
def test_super_blocks_of_the_library_gguf_are_given_back(name):
    kind, draw = gguf.GGMLQuantizationType[name], _random(1)
    size, length = gguf.GGML_QUANT_SIZES[kind]
    bits, block, places = SUPER_BLOCKS[name]
    stored = draw.integers(0, 256, (ROWS, 1024 // size, length)).astype(numpy.uint8)
    for place in places:
        scale = draw.uniform(0.001, 0.01, (*stored.shape[:2], 1)).astype(numpy.float16).view(numpy.uint8)
        stored[..., place : place + 2 or None] = scale
    read = numpy.ascontiguousarray(gguf.dequantize(stored.reshape(ROWS, -1), kind))
    grid = find_grid(read)
    assert (grid.bits, grid.numbers.shape[2]) == (bits, block)
    apart = numpy.abs(grid.weights() - read).reshape(-1, block).max(1)
    assert bool((apart <= numpy.abs(read).reshape(-1, block).max(1) * 2.0**-21).all())


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
def test_a_product_is_that_of_the_same_weights_and_integers_take_the_room_of_their_bits(tmp_path, name, block):
    """The identity reads the weights out; 32 of them have a scale of 32 bits, and 16 bits for a lowest weight."""
    linear, path = _linear(block=block, **FORMS[name]), tmp_path / "m.onnx"
    x = torch.eye(COLUMNS)
    export_onnx(linear, (x,), path=path, cases=[], quantize="keep", dynamic_shapes=None)
    assert [node.op_type for node in _graph(path).node].count("MatMulNBits") == 1
    found = onnxruntime.InferenceSession(path).run(None, {"input": x.numpy()})[0]
    apart = numpy.abs(found.T - linear.weight.detach().numpy())
    assert float(apart.max()) <= 4e-6 * float(linear.weight.detach().abs().max())
    if block == 32:
        bits = (8 if "8 bits" in name else 4) + 1 + 0.5 * ("lowest" in name) + 0.125 * ("whole" in name)
        stored = sum(len(tensor.raw_data) for tensor in _graph(path).initializer)
        assert stored == linear.weight.numel() * bits / 8


@pytest.mark.parametrize("name", FORMS)
def test_an_embedding_alone_is_kept_too(tmp_path, name):
    weight = torch.nn.Parameter(torch.from_numpy(_made(block=32, **FORMS[name])))
    parts = {"table": torch.nn.Embedding(ROWS, COLUMNS, _weight=weight), "head": _linear(seed=1, **FORMS[name])}
    model = module_of(lambda self, ids: (self.table(ids), self.head(self.table(ids))), **parts)
    path, ids = tmp_path / "m.onnx", torch.arange(ROWS).reshape(4, 10)
    report = export_onnx(model, (ids,), path=path, cases=[], quantize="keep").report
    assert report.onnx_bytes < 0.4 * 4 * 2 * ROWS * COLUMNS
    table = model.table.weight.detach()
    rows = torch.from_numpy(onnxruntime.InferenceSession(path).run(None, {"ids": ids.numpy()})[0])
    assert float((rows - table[ids]).abs().max()) <= 4e-6 * float(table.abs().max())


class Tied(torch.nn.Module):
    """A head that reads the table, or what a layer makes of it."""

    def __init__(self, head, middle=None):
        super().__init__()
        self.table = torch.nn.Embedding(*(head.weight.shape if middle is None else (1200, 64)))
        self.head, self.middle = head, middle
        if middle is None:
            self.table.weight = head.weight

    def forward(self, ids):
        found = self.table(ids)
        return self.head(found if self.middle is None else self.middle(found))


def test_a_head_and_its_embedding_are_one_table_of_integers(tmp_path):
    model, path = Tied(_linear(**FORMS["a lowest weight"])).eval(), tmp_path / "m.onnx"
    report = export_onnx(model, (torch.arange(6).reshape(2, 3),), path=path, cases=[], quantize="int4").report
    assert any("in the file once" in remark for remark in report.remarks)
    assert any(remark.startswith("already integers with scales") for remark in report.remarks)
    assert report.onnx_bytes < 0.25 * 4 * ROWS * COLUMNS
    assert report.quality.relative_difference < 0.01


def test_half_precision_keeps_integers_too(tmp_path):
    """onnxruntime multiplies float16 with few bits in one way only: its inputs are rounded, whatever is asked for."""
    linear, path = _linear(**FORMS["a lowest weight"]).half(), tmp_path / "m.onnx"
    x = torch.from_numpy(numpy.random.default_rng(0).standard_normal((3, COLUMNS))).half()
    how = Quantization("keep", activations="float")
    quality = export_onnx(linear, (x,), path=path, cases=[], quantize=how).report.quality
    assert quality.relative_difference < 0.02
    sizes, kinds = _kinds(path)
    assert sizes["accuracy_level"] == 4
    assert "Split" not in kinds


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
    model = Tied(_linear(**FORMS[name]), torch.nn.Linear(64, COLUMNS)).eval()
    path, ids = tmp_path / "m.onnx", torch.arange(6).reshape(2, 3)
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


def _weights(bits):
    return _linear(bias=True, **FORMS["8 below" if bits == 4 else "8 bits"])


def _found(path, x):
    session = onnxruntime.InferenceSession(path)
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def _kinds(path):
    nodes = _graph(path).node
    (product,) = [node for node in nodes if node.op_type == "MatMulNBits"]
    return {attribute.name: attribute.i for attribute in product.attribute}, [node.op_type for node in nodes]


def _inputs(*shape):
    draw = numpy.random.default_rng(0)
    x = draw.standard_normal(shape) * 10.0 ** draw.integers(-7, 0, shape)
    x[..., :32] = 0
    return torch.from_numpy(x.astype(numpy.float32))


@pytest.mark.parametrize("shape", [(7, COLUMNS), (3, 5, COLUMNS), (2, 1, 4, COLUMNS)])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_is_that_of_the_weights_for_inputs_of_any_size(tmp_path, bits, shape):
    linear, x, apart = _weights(bits), _inputs(*shape), {}
    wanted = torch.nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double()).detach().numpy()
    for kept in ("float", "int8"):
        how = Quantization("keep", activations=kept)
        export_onnx(linear, (x,), path=tmp_path / f"{kept}.onnx", cases=[], quantize=how, dynamic_shapes=None)
        apart[kept] = float(numpy.abs(_found(tmp_path / f"{kept}.onnx", x) - wanted).max() / numpy.abs(wanted).max())
    assert apart["float"] < 5e-5
    assert apart["int8"] > 50 * apart["float"]


def test_the_batch_stays_dynamic_and_inputs_are_split_once_for_all_products(tmp_path):
    parts, path = torch.nn.ModuleList(_weights(8) for _ in range(3)), tmp_path / "m.onnx"
    model = module_of(lambda self, x: torch.stack([part(x) for part in self.parts]), parts=parts)
    free = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    how = Quantization("keep", activations="float")
    export_onnx(model, (_inputs(2, 3, COLUMNS),), path=path, dynamic_shapes=free, quantize=how)
    assert [node.op_type for node in onnx.load(path).graph.node].count("Round") == 1
    for batch in (0, 1, 5):
        x = _inputs(batch, 4, COLUMNS)
        with torch.no_grad():
            expected = model(x).numpy()
        numpy.testing.assert_allclose(_found(path, x), expected, atol=5e-5 * float(numpy.abs(expected).max(initial=1)))


@pytest.mark.parametrize(("bits", "level", "is_split"), [(4, 1, False), (8, 4, True)])
def test_where_integers_are_kept_nothing_is_rounded(tmp_path, bits, level, is_split):
    """A split without a text keeps floats, too, and names the argument: what channels are large is read from it."""
    for how, said in (("keep", 'activations="split"'), (Quantization("keep", activations="split"), "calibration=")):
        x = (_inputs(4, COLUMNS),)
        done = export_onnx(_weights(bits), x, path=tmp_path / "m.onnx", quantize=how, cases=[])
        assert [remark for remark in done.report.remarks if said in remark]
        sizes, kinds = _kinds(tmp_path / "m.onnx")
        assert (sizes["accuracy_level"], "Split" in kinds) == (level, is_split)


def _quality(divergence):
    return Quality("int8", 32, 10, 0.1, 0.01, 0.01, 1.0, divergence, 0, None, None, 1.01)


@pytest.mark.parametrize(
    ("rounded", "kept", "is_kept"),
    [
        (0.008, 0.001, True),  # inputs cost most
        (0.008, 0.005, False),  # weights cost as much
        (0.0002, 0.0, False),  # nobody notices
    ],
)
def test_inputs_are_kept_where_rounding_them_costs_more_than_weights(tmp_path, monkeypatch, rounded, kept, is_kept):
    measured = iter([_quality(rounded), _quality(kept)])
    monkeypatch.setattr(quantized, "measure", lambda *_, **__: next(measured))
    done = export_onnx(_weights(8), (_inputs(4, COLUMNS),), path=tmp_path / "m.onnx", quantize="int8", cases=[])
    said = [remark for remark in done.report.remarks if 'activations="split"' in remark]
    assert (len(said), "Split" in _kinds(tmp_path / "m.onnx")[1]) == (is_kept, is_kept)
    assert done.report.quality.divergence == (kept if is_kept else rounded)


def test_float16_has_one_kernel_which_rounds_activations(tmp_path):
    for kept in ("split", "token"):
        model, how = _weights(8).half(), Quantization("int8", activations=kept)
        with pytest.raises(InvalidArgumentError, match=rf'"{kept}" needs float32 weights, but Linear has float16'):
            export_onnx(model, (_inputs(4, COLUMNS).half(),), path=tmp_path / "m.onnx", cases=[], quantize=how)
        export_onnx(model.float(), (_inputs(4, COLUMNS),), path=tmp_path / "m.onnx", cases=[], quantize=how)
