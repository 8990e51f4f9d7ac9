"""NaN equals NaN whatever was computed before: what a replay does not show, it does not state as shown."""

import math

import pytest
import torch

from tests.flatten.export.answers import Answers
from yobx_flatten import Case, ReplayError, StoredCase, export_onnx, export_program, record_calls, replay_case
from yobx_flatten.core.compare import share_of_nan

NAN = float("nan")


@pytest.mark.parametrize(
    ("leaf", "share"),
    [
        (torch.tensor([1.0, NAN, 2.0, 3.0]), 0.25),
        (torch.tensor([NAN, -math.inf]), 1.0),
        (torch.tensor([1.0, -math.inf]), 0.0),  # a mask
        (torch.tensor([complex(NAN, 1), 1j]), 0.5),
        (torch.tensor([NAN, 1.0]).to(torch.float8_e4m3fn), 0.5),
        (torch.tensor([NAN, 1.0], dtype=torch.bfloat16), 0.5),
        (torch.tensor([3, 4]), 0.0),
        (torch.nested.nested_tensor([torch.tensor([NAN]), torch.ones(3)], layout=torch.jagged), 0.25),
        (torch.empty(0), None),
        (NAN, 1.0),
        ("text", None),
        (10**400, 0.0),
        (None, None),
    ],
)
def test_the_share_of_a_leaf(leaf, share):
    assert share_of_nan(leaf) == share


@pytest.mark.parametrize("answer", [lambda x: x / 0.0 * 0.0, lambda x: x / 0.0], ids=["NaN", "infinite"])
def test_outputs_without_a_number_prove_nothing(tmp_path, answer):
    module = Answers(lambda x: {"sum": x.sum(), "nothing": answer(x)})
    with pytest.raises(
        ReplayError,
        match=r"Answers could not be checked: the model itself returns only NaN or infinite values in nothing",
    ):
        export_program(module, (torch.ones(3, 2),))
    with pytest.raises(ReplayError, match=r"could not be checked"):
        export_onnx(module, (torch.ones(3, 2),), path=tmp_path / "nan.onnx")
    assert not any(tmp_path.iterdir())


def test_a_row_of_nan_is_noted():
    linear = torch.nn.Linear(3, 4)
    linear.weight.data[1] = NAN
    report = export_program(linear, (torch.ones(5, 3),)).report
    assert report.ok
    assert "note: values that are NaN in the model itself were not compared: up to 25.0% of output." in str(report)


def test_nan_of_one_case_is_noted():
    module = Answers(lambda x: (x - x.mean(0)).square().sum(0) / (x.shape[0] - 1))
    cases = [Case("one row", (torch.rand(1, 3),)), Case("five rows", (torch.rand(5, 3),))]
    report = export_program(module, (torch.rand(4, 3),), cases=cases).report
    assert report.ok
    assert "up to 100.0% of output" in str(report)


def test_nan_at_padding_is_not_compared_and_not_noted():
    """A row that sees no position is a softmax over nothing."""

    class Tokens(torch.nn.Module):
        def forward(self, input_ids, attention_mask):
            return torch.where(attention_mask == 0, NAN, input_ids.float())[..., None].repeat(1, 1, 2)

    given = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "attention_mask": torch.ones(2, 3, dtype=torch.int64)}
    padded = {**given, "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    report = export_program(Tokens(), (), given, cases=[Case("padded", (), padded)]).report
    assert report.ok
    assert "NaN" not in str(report)
    assert "positions that the attention mask excludes were not compared" in str(report)


def test_recorded_calls_and_stored_cases_say_so(tmp_path):
    module = Answers(lambda x: x / 0.0 * 0.0)
    x = torch.ones(2, 3)
    with record_calls(module) as calls:
        module(x)
    replayed = calls.replay(torch.export.export(module, (x,)))
    assert not replayed.ok
    assert "the model itself returns only NaN or infinite values in " in str(replayed)
    linear = torch.nn.Linear(3, 2)
    linear.weight.data[:] = NAN
    export_onnx(linear, (x,), path=tmp_path / "a.onnx", proof="none")
    report = replay_case(StoredCase({"input": x}, linear(x).detach()), tmp_path / "a.onnx")
    assert not report.ok
    assert "the model itself returns only NaN or infinite values in " in str(report)
