"""Quantised weights and inputs of full precision: the product is that of the weights in the file, for any input."""

import numpy
import onnx
import onnxruntime
import pytest
import torch

from tests.flatten.export.test_weight_grid import COLUMNS, ROWS, _made
from tests.flatten.export.trained_model import trained_model
from yobx_flatten import DecodeSizes, InvalidArgumentError, decode_inputs, export_onnx
from yobx_flatten.export import Quantization
from yobx_flatten.export.onnx import quantized
from yobx_flatten.export.proof.quality import Quality

BITS = {4: {"levels": 16, "first": -8}, 8: {"levels": 255, "first": -127}}


def _weights(bits, columns=COLUMNS):
    linear = torch.nn.Linear(columns, ROWS, bias=True).eval()
    linear.weight = torch.nn.Parameter(torch.from_numpy(_made(block=32, **BITS[bits]))[:, :columns].contiguous())
    return linear


def _found(path, x):
    session = onnxruntime.InferenceSession(path)
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def _kinds(path):
    nodes = onnx.load(path).graph.node
    (product,) = [node for node in nodes if node.op_type == "MatMulNBits"]
    return {attribute.name: attribute.i for attribute in product.attribute}, [node.op_type for node in nodes]


def _inputs(*shape):
    """Sizes over seven magnitudes in each block, and one block of zeros."""
    draw = numpy.random.default_rng(0)
    x = draw.standard_normal(shape) * 10.0 ** draw.integers(-7, 0, shape)
    x[..., :32] = 0
    return torch.from_numpy(x.astype(numpy.float32))


@pytest.mark.parametrize("shape", [(7, COLUMNS), (3, 5, COLUMNS), (2, 1, 4, COLUMNS)])
@pytest.mark.parametrize("bits", BITS)
def test_a_product_is_that_of_the_weights_for_inputs_of_any_size(tmp_path, bits, shape):
    """In float64, next to both files: rounded inputs are a hundred times as far, or more."""
    linear, x, apart = _weights(bits), _inputs(*shape), {}
    wanted = torch.nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double()).detach().numpy()
    for kept in ("float", "int8"):
        how = Quantization("keep", activations=kept)
        export_onnx(linear, (x,), path=tmp_path / f"{kept}.onnx", cases=[], quantize=how, dynamic_shapes=None)
        apart[kept] = float(numpy.abs(_found(tmp_path / f"{kept}.onnx", x) - wanted).max() / numpy.abs(wanted).max())
    assert apart["float"] < 5e-5
    assert apart["int8"] > 50 * apart["float"]


def test_the_batch_stays_dynamic_and_inputs_are_split_once_for_all_products(tmp_path):

    class Three(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList(_weights(8) for _ in range(3))

        def forward(self, x):
            return torch.stack([part(x) for part in self.parts])

    model, path = Three().eval(), tmp_path / "m.onnx"
    free = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    how = Quantization("keep", activations="float")
    export_onnx(model, (_inputs(2, 3, COLUMNS),), path=path, dynamic_shapes=free, quantize=how)
    assert [node.op_type for node in onnx.load(path).graph.node].count("Round") == 1
    for batch in (0, 1, 5):
        x = _inputs(batch, 4, COLUMNS)
        with torch.no_grad():
            expected = model(x).numpy()
        numpy.testing.assert_allclose(_found(path, x), expected, atol=5e-5 * float(numpy.abs(expected).max(initial=1)))


def test_half_precision_is_rounded_as_before(tmp_path):
    """onnxruntime multiplies float16 with few bits in one way only."""
    linear = _weights(8).half()
    how = Quantization("keep", activations="float")
    export_onnx(linear, (_inputs(4, COLUMNS).half(),), path=tmp_path / "m.onnx", cases=[], quantize=how)
    sizes, kinds = _kinds(tmp_path / "m.onnx")
    assert sizes["accuracy_level"] == 4
    assert "Split" not in kinds


@pytest.mark.parametrize(("bits", "level", "is_split"), [(4, 1, False), (8, 4, True)])
def test_where_integers_are_kept_nothing_is_rounded(tmp_path, bits, level, is_split):
    x = (_inputs(4, COLUMNS),)
    done = export_onnx(_weights(bits), x, path=tmp_path / "m.onnx", quantize="keep", cases=[])
    assert [remark for remark in done.report.remarks if 'activations="split"' in remark]
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
        (0.0004, 0.0, True),
    ],
)
def test_inputs_are_kept_where_rounding_them_costs_more_than_rounding_weights(
    tmp_path, monkeypatch, rounded, kept, is_kept
):
    measured = iter([_quality(rounded), _quality(kept)])
    monkeypatch.setattr(quantized, "measure", lambda *_, **__: next(measured))
    done = export_onnx(_weights(8), (_inputs(4, COLUMNS),), path=tmp_path / "m.onnx", quantize="int8", cases=[])
    said = [remark for remark in done.report.remarks if 'activations="split"' in remark]
    assert (len(said), "Split" in _kinds(tmp_path / "m.onnx")[1]) == (is_kept, is_kept)
    assert done.report.quality.divergence == (kept if is_kept else rounded)


def test_a_language_model_is_nearer_with_inputs_of_full_precision(tmp_path):
    model, found = trained_model(), {}
    kwargs = decode_inputs(model, DecodeSizes(batch=2, past=5, new=3))
    for kept in ("float", "int8"):
        how = Quantization("int8", activations=kept)
        found[kept] = export_onnx(model, kwargs=kwargs, path=tmp_path / f"{kept}.onnx", quantize=how).report.quality
    assert found["float"].divergence < 0.5 * found["int8"].divergence


@pytest.mark.parametrize("activations", ["split", "token"])
def test_float16_has_one_kernel_which_rounds_activations(tmp_path, activations):
    model, how = _weights(8).half(), Quantization("int8", activations=activations)
    with pytest.raises(InvalidArgumentError, match=rf'"{activations}" needs float32 weights, but Linear has float16'):
        export_onnx(model, (_inputs(4, COLUMNS).half(),), path=tmp_path / "m.onnx", cases=[], quantize=how)
    export_onnx(model.float(), (_inputs(4, COLUMNS),), path=tmp_path / "m.onnx", cases=[], quantize=how)


def test_a_split_without_a_text_keeps_floats_and_names_the_argument(tmp_path):
    """What channels are large is read from a text."""
    how = Quantization("keep", activations="split")
    done = export_onnx(_weights(4), (_inputs(4, COLUMNS),), path=tmp_path / "m.onnx", cases=[], quantize=how)
    assert [remark for remark in done.report.remarks if "Quantization(calibration=tokens)" in remark]
    assert _kinds(tmp_path / "m.onnx")[0]["accuracy_level"] == 1
