"""The module computes a case once for all runtimes, and what one of them writes to its inputs reaches no other."""

import copy
import itertools

import pytest
import torch

from yobx_flatten import Case, export_onnx
from yobx_flatten.export.proof import eager_runs
from yobx_flatten.export.proof.eager_runs import EagerRuns


class Counts(torch.nn.Module):
    """Counts its calls outside of traces, where no proof undoes it: an iterator of C has no attributes."""

    def __init__(self):
        super().__init__()
        self._numbers = itertools.count()

    def forward(self, x):
        if not torch.compiler.is_exporting():
            next(self._numbers)
        return x * 2

    @property
    def calls(self):
        return next(copy.copy(self._numbers))


@pytest.fixture
def module():
    return Counts()


def test_a_case_runs_once(module):
    """Another case runs by itself, also one with equal inputs."""
    runs = EagerRuns(module)
    cases = [Case("one", (torch.ones(3),)), Case("one", (torch.ones(3),))]
    for case in (*cases, *cases):
        (step,) = runs.steps(case)
        torch.testing.assert_close(step.outputs, torch.full((3,), 2.0))
    assert module.calls == 2


def test_what_is_written_to_a_step_reaches_no_other(module):
    """Inputs and outputs are copies."""
    runs, case = EagerRuns(module), Case("one", (), {"x": torch.ones(3)})
    for _ in range(3):
        (step,) = runs.steps(case)
        torch.testing.assert_close(step.given["x"], torch.ones(3))
        torch.testing.assert_close(step.outputs, torch.full((3,), 2.0))
        step.given["x"].fill_(9)
        step.outputs.fill_(9)


@pytest.mark.parametrize(("more", "calls"), [(0, 1), (1, 2)])
def test_a_long_case_is_not_kept(module, monkeypatch, more, calls):
    """Inputs by name and outputs, of 12 bytes each, up to the limit and one number past it."""
    monkeypatch.setattr(eager_runs, "KEPT_BYTES", 24)
    runs, case = EagerRuns(module), Case("one", (), {"x": torch.ones(3 + more)})
    runs.steps(case)
    runs.steps(case)
    assert module.calls == calls


def test_a_file_is_compared_with_the_calls_of_the_program(module, tmp_path):
    """`torch.export` and onnxruntime: as many calls of the module as for one of them."""
    pytest.importorskip("onnxruntime")
    report = export_onnx(module, (torch.ones(2, 3),), path=tmp_path / "m.onnx", cases=[]).report
    assert {result.runtime for result in report.cases} == {"torch.export", "onnxruntime"}
    before = module.calls
    both = export_onnx(module, (torch.ones(2, 3),), path=tmp_path / "n.onnx", cases=[Case("b", (torch.ones(2, 3),))])
    assert len(both.report.cases) == 4
    assert module.calls - before == before + 1
