"""Without cases, an export is compared at other sizes and values, which the module itself accepts."""

from __future__ import annotations

import dataclasses

import onnxscript
import pytest
import torch

from tests.modules import module_of
from yobx_flatten import ReplayError, export_onnx, export_program

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]
ATEN = torch.ops.aten
op = onnxscript.opset18


class Calls(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, mask=None):
        return self.function(x) if mask is None else self.function(x, mask)


def _cut_ids(weight, ids, *_):
    return op.Gather(weight, op.Min(ids, op.Constant(value_ints=[5])))


def _as_traced(x):
    return op.Reshape(op.Relu(x), op.Constant(value_ints=[2, 3]))


POSITIVE = torch.rand(2, 3) + 0.5
SMALL = torch.randn(2, 3) / 10
ALL = torch.ones(2, 3, dtype=torch.bool)


@dataclasses.dataclass(frozen=True)
class Fault:
    module: torch.nn.Module
    example: tuple[torch.Tensor, ...]
    operator: object
    translation: object
    case: str


FAULTS = {
    "a sign": Fault(Calls(torch.relu), (POSITIVE,), ATEN.relu.default, op.Identity, "other sizes: x"),
    "a size": Fault(Calls(torch.relu), (SMALL,), ATEN.relu.default, _as_traced, "other sizes: x"),
    "zero": Fault(
        Calls(torch.sign), (SMALL,), ATEN.sign.default, lambda x: op.Div(x, op.Abs(x)), "zeros, False and lowest values"
    ),
    "a zero with a sign": Fault(
        Calls(torch.signbit), (SMALL,), ATEN.signbit.default,
        lambda x: op.Less(x, op.CastLike(op.Constant(value_float=0.0), x)), "zeros, False and lowest values",
    ),
    "False": Fault(
        Calls(lambda x, mask: torch.where(mask, x, x * 2)), (SMALL, ALL), ATEN.where.self,
        lambda mask, x, other: op.Identity(x), "other sizes: x",
    ),
    "a negative integer": Fault(
        Calls(lambda x: x // 2), (torch.tensor([[4, 7], [9, 2]]),), ATEN.floor_divide.default,
        lambda x, by: op.Div(x, op.CastLike(op.Constant(value_int=by), x)), "zeros, False and lowest values",
    ),
    "the highest integer": Fault(
        module_of(lambda self, ids: self.table(ids), table=torch.nn.Embedding(10, 4)),
        (torch.tensor([[0, 3, 1], [2, 4, 1]]),), ATEN.embedding.default, _cut_ids, "large, small and highest values",
    ),
    "a large number": Fault(
        Calls(lambda x: x.clamp(-9.0, 9.0)), (SMALL,), ATEN.clamp.default, lambda x, *_: op.Identity(x),
        "large, small and highest values",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_translation_that_is_right_for_the_example_alone_is_refused(name, tmp_path):
    fault, path = FAULTS[name], tmp_path / "m.onnx"
    with pytest.raises(ReplayError) as caught:
        export_onnx(fault.module, fault.example, path=path, translations={fault.operator: fault.translation})
    failed = {case.case for case in caught.value.report.failed()}
    assert any(one.startswith(fault.case) for one in failed), failed
    assert not path.exists()


def test_cases_that_are_given_are_all_that_is_compared(tmp_path):
    fault = FAULTS["the highest integer"]
    how = {"path": tmp_path / "m.onnx", "translations": {fault.operator: fault.translation}, "cases": ()}
    assert {case.case for case in export_onnx(fault.module, fault.example, **how).report.cases} == {"the example"}


def _refuses_zeros(x):
    if not torch.compiler.is_compiling():
        torch._check_with(ValueError, not bool((x == 0).any()), lambda: "zeros are not for me")
    return 1 / x


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    ("function", "remark"),
    [
        (_refuses_zeros, "of x were not replayed: Calls does not accept them: zeros are"),
        (lambda x: torch.log(x) / torch.log(x), "of x were not replayed"),
        (lambda x: x.reshape(2, 3) + 1, None),
    ],
    ids=["error", "NaN", "fixed size"],
)
def test_what_the_module_does_not_accept_is_no_case(function, remark):
    report = export_program(Calls(function), (POSITIVE,)).report
    assert report.ok
    assert not remark or any(f"zeros, False and lowest values {remark}" in one for one in report.remarks)


AMPLIFY = {
    "rounded": lambda x: torch.round(1000 * x.cumsum(-1)),
    "turned": lambda x: torch.sin(1e5 * x),
    "chosen": lambda x: x.topk(2, -1)[1],
    "sorted": lambda x: torch.sort(x, -1, descending=True)[1],
    "overflow": lambda x: x.exp().softmax(-1),
    "largest": lambda x: (x @ x.mT).argmax(-1),
    "normalised": lambda x: torch.nn.functional.layer_norm(x, (3,)) ** 5,
}


@pytest.mark.parametrize("kind", AMPLIFY)
def test_a_module_that_amplifies_rounding_is_exported(kind, tmp_path):
    """Where the module itself changes with the last digits of its inputs, the file may differ as much."""
    for seed in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        assert export_onnx(Calls(AMPLIFY[kind]), (x,), path=tmp_path / "m.onnx").report.ok


def test_vocabulary_and_mask_are_varied_within_what_the_module_takes(tmp_path):
    def pooled(self, ids, mask):
        return (self.table(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)

    ids, mask = torch.tensor([[0, 1, 2], [3, 1, 0]]), torch.ones(2, 3, dtype=torch.int64)
    report = export_onnx(
        module_of(pooled, table=torch.nn.Embedding(7, 4)), (ids, mask), path=tmp_path / "m.onnx"
    ).report
    names = [case.case for case in report.cases if case.runtime == "onnxruntime"]
    assert names == [
        "the example",
        "other sizes: ids (5, 7), mask (5, 7)",
        "zeros, False and lowest values",
        "large, small and highest values",
    ]
    assert report.ok


def test_infinities_are_stated_and_no_failure(tmp_path):
    wrong = {
        ATEN.tanh.default: lambda x: op.Where(op.IsInf(x), op.CastLike(op.Constant(value_float=3.0), x), op.Tanh(x))
    }
    report = export_onnx(Calls(torch.tanh), (SMALL,), path=tmp_path / "m.onnx", translations=wrong).report
    assert report.ok
    assert any("with infinite values, onnxruntime differs from the module" in one for one in report.remarks)


def test_fixed_sizes_have_other_values(tmp_path):
    report = export_onnx(Calls(torch.relu), (POSITIVE,), path=tmp_path / "m.onnx", dynamic_shapes=None).report
    assert [case.case for case in report.cases][1] == "other values"
