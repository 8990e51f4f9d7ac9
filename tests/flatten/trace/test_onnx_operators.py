"""What stands in, inside the block, for operators that torch's ONNX exporter does not know."""

import importlib.util

import pytest
import torch

from yobx_flatten import export_onnx, register_flattening_functions

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]


class _Rotary(torch.nn.Module):
    def forward(self, x, angles):
        turns = torch.polar(torch.ones_like(angles), angles)
        x = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(x * turns.unsqueeze(1)).flatten(-2), torch.view_as_real(turns.unsqueeze(-1))


class _ErfInv(torch.nn.Module):
    def forward(self, x):
        return torch.special.erfinv(x)


def _converted(module, *args):
    with register_flattening_functions():
        return torch.onnx.export(torch.export.export(module, args), dynamo=True, verbose=False)


def test_an_axis_goes_into_a_complex_tensor():
    x, angles = torch.randn(2, 3, 4, 8), torch.rand(2, 4, 4)
    found = _converted(_Rotary(), x, angles)(x, angles)
    for ours, theirs in zip(found, _Rotary()(x, angles), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_inverse_error_function_is_exact_to_the_last_digits():
    x = torch.cat([torch.linspace(-0.999999, 0.999999, 20001), torch.tensor([1.0, -1.0, 0.0, 2.0, 1 - 1e-7])])
    (found,) = _converted(_ErfInv(), x)(x)
    torch.testing.assert_close(found, torch.special.erfinv(x), rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dim", [0, -1])
def test_a_stable_sort_keeps_the_order_of_equals(dim, descending):

    class Sort(torch.nn.Module):
        def forward(self, x):
            return tuple(torch.sort(x, stable=True, dim=dim, descending=descending))

    x = torch.randint(0, 3, (7, 9), generator=torch.Generator().manual_seed(0)).float()
    for ours, theirs in zip(_converted(Sort(), x)(x), Sort()(x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("last", [1, 0])
def test_all_true_is_one_truth_value(last):

    class AllTrue(torch.nn.Module):
        def forward(self, x):
            return torch.ops.aten._is_all_true(x > 0)

    x = torch.tensor([[1, 2], [3, last]])
    assert _converted(AllTrue(), x)(x)[0].item() is bool(last)


def test_torch_has_its_own_table_again_outside_of_the_block():
    from torch.onnx._internal.exporter import _registration

    found = vars(_registration.ONNXRegistry)["from_torchlib"]
    with register_flattening_functions():
        assert vars(_registration.ONNXRegistry)["from_torchlib"] is not found
    assert vars(_registration.ONNXRegistry)["from_torchlib"] is found
    with pytest.raises(torch.onnx.OnnxExporterError):
        torch.onnx.export(torch.export.export(_ErfInv(), (torch.zeros(3),)), dynamo=True, verbose=False)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers.exporters") is None, reason="transformers before 5.17 brings no translation"
)
def test_experts_are_converted_by_the_plain_function():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads)).eval()
    ids = torch.randint(4, 32, (2, 5))
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False})
        converted = torch.onnx.export(program, dynamo=True, verbose=False)
    torch.testing.assert_close(converted(ids)[0], model(ids).logits, rtol=1e-4, atol=1e-5)


def test_export_onnx_uses_both(tmp_path):
    for name, module, args in (
        ("rotary", _Rotary(), (torch.randn(2, 3, 4, 8), torch.rand(2, 4, 4))),
        ("erf_inv", _ErfInv(), (torch.linspace(-0.9, 0.9, 7),)),
    ):
        exported = export_onnx(module, args, path=tmp_path / f"{name}.onnx", dynamic_shapes=None)
        assert {case.runtime for case in exported.report.cases} == {"torch.export", "onnxruntime"}
