"""Operators and methods of the user's own: translated with ``translations=``, or named with the line to type."""

import onnxruntime
import onnxscript
import pytest
import torch

from yobx_flatten import export_onnx, export_program, record_calls
from yobx_flatten.errors import InvalidArgumentError, ReplayError


@torch.library.custom_op("yobx_tests::twice_plus", mutates_args=())
def twice_plus(x: torch.Tensor, more: float) -> torch.Tensor:
    return 2 * x + more


@twice_plus.register_fake
def _(x, more):
    return torch.empty_like(x)


OPERATOR = torch.ops.yobx_tests.twice_plus.default


class Own(torch.nn.Module):
    def forward(self, x):
        return (torch.ops.yobx_tests.twice_plus(x * 0.5, 3.0)).relu() + 1


def _translated(factor):
    op = onnxscript.opset18

    def translation(x, more):
        return op.Add(op.Mul(x, op.Constant(value_float=factor)), op.Constant(value_float=more))

    return translation


def test_an_operator_of_ones_own_is_written_with_its_translation(tmp_path):
    x = torch.randn(4, 3)
    export_onnx(Own(), (x,), path=tmp_path / "own.onnx", translations={OPERATOR: _translated(2.0)})
    session = onnxruntime.InferenceSession(tmp_path / "own.onnx")
    (found,) = session.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.tensor(found), (x + 3).relu() + 1)


def test_a_wrong_translation_is_refused(tmp_path):
    with pytest.raises(ReplayError, match="differs from the eager model") as caught:
        export_onnx(Own(), (torch.randn(4, 3),), path=tmp_path / "o.onnx", translations={OPERATOR: _translated(5.0)})
    assert "the first value that differs is 'twice_plus' (yobx_tests.twice_plus.default" in str(caught.value)
    assert not (tmp_path / "o.onnx").exists()


@pytest.mark.parametrize("translations", [{"twice_plus": _translated}, {OPERATOR: "Add"}])
def test_what_is_no_translation_is_named(translations, tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"(?s)translations: expected a dict from operators.*translations="):
        export_onnx(Own(), (torch.randn(4, 3),), path=tmp_path / "o.onnx", translations=translations)


class Encodes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x)

    def encode(self, x, scale):
        return self.linear(x) * scale


@pytest.mark.parametrize("export", [export_program, export_onnx])
def test_a_method_is_named_with_the_way_that_exports_it(export):
    """A method is no module; a recorded call of it is one."""
    with pytest.raises(InvalidArgumentError, match=r"the method 'encode' of Encodes.*") as caught:
        export(Encodes().encode, (torch.randn(4, 3), torch.ones(2)))
    assert "with record_calls(model, method='encode') as calls: model.encode(...)" in str(caught.value)
    assert "export_onnx(calls.module(), kwargs=calls.example()" in str(caught.value)


def test_the_way_that_is_named_exports_a_method(tmp_path):
    model = Encodes().eval()
    with record_calls(model, method="encode") as calls:
        for rows in (4, 6):
            model.encode(torch.randn(rows, 3), torch.ones(2))
    export_onnx(calls.module(), kwargs=calls.example(), path=tmp_path / "encode.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "encode.onnx")
    x, scale = torch.randn(9, 3), torch.tensor([2.0, 3.0])
    (found,) = session.run(None, {"x": x.numpy(), "scale": scale.numpy()})
    torch.testing.assert_close(torch.tensor(found), model.encode(x, scale).detach())
