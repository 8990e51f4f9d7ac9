"""What stands in for operators that torch's ONNX exporter does not know."""

import pytest
import torch

from yobx_flatten import export_onnx
from yobx_flatten.onnx_operators import translations, without_complex_unsqueeze

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class _Rotary(torch.nn.Module):
    """Complex rotary embedding, with axes inserted from either end."""

    def forward(self, x, angles):
        turns = torch.polar(torch.ones_like(angles), angles)
        x = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(x * turns.unsqueeze(1)).flatten(-2), torch.view_as_real(turns.unsqueeze(-1))


class _ErfInv(torch.nn.Module):
    def forward(self, x):
        return torch.special.erfinv(x)


def _converted(module, *args):
    program = torch.export.export(module, args)
    return torch.onnx.export(
        without_complex_unsqueeze(program), custom_translation_table=translations(), dynamo=True, verbose=False
    )


def test_an_axis_goes_into_a_complex_tensor():
    """The ONNX file of a complex rotary embedding computes what PyTorch does, with axes from the front and the end."""
    x, angles = torch.randn(2, 3, 4, 8), torch.rand(2, 4, 4)
    found = _converted(_Rotary(), x, angles)(x, angles)
    for ours, theirs in zip(found, _Rotary()(x, angles), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_program_of_real_numbers_stays_as_it_is():
    """Nothing is decomposed that needs no help."""
    program = torch.export.export(_ErfInv(), (torch.zeros(3),))
    assert without_complex_unsqueeze(program) is program


def test_the_inverse_error_function_is_exact_to_the_last_digits():
    """Centre, tail, the ends and beyond them agree with PyTorch's own."""
    x = torch.cat([torch.linspace(-0.999999, 0.999999, 20001), torch.tensor([1.0, -1.0, 0.0, 2.0, 1 - 1e-7])])
    (found,) = _converted(_ErfInv(), x)(x)
    torch.testing.assert_close(found, torch.special.erfinv(x), rtol=1e-6, atol=1e-7, equal_nan=True)


def test_export_onnx_uses_both(tmp_path):
    """The helper converts such modules, of any library, and replays them in onnxruntime."""
    for name, module, args in (
        ("rotary", _Rotary(), (torch.randn(2, 3, 4, 8), torch.rand(2, 4, 4))),
        ("erf_inv", _ErfInv(), (torch.linspace(-0.9, 0.9, 7),)),
    ):
        exported = export_onnx(module, args, path=tmp_path / f"{name}.onnx", dynamic_shapes=None)
        assert {case.runtime for case in exported.report.cases} == {"torch.export", "onnxruntime"}
