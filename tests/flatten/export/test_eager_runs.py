"""The module computes a case once for all runtimes, and what one of them writes to its inputs reaches no other.

The module is called with the objects of the caller, whatever their flatten function leaves out.
"""

import contextlib
import functools
import random
import threading

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree

from yobx_flatten import Case, export_onnx, export_program, register_class_flattening, unregister_class_flattening
from yobx_flatten.errors import InvalidArgumentError, ReplayError
from yobx_flatten.export.proof import eager_runs
from yobx_flatten.export.proof.eager_runs import EagerRuns, eager_steps


class Counts(torch.nn.Module):
    """Counts its calls outside of traces, where no proof undoes it: an iterator of C has no attributes."""

    def __init__(self):
        super().__init__()
        self._numbers = iter(range(1000))

    def forward(self, x):
        if not torch.compiler.is_exporting():
            next(self._numbers)
        return x * 2

    @property
    def calls(self):
        return 1000 - self._numbers.__length_hint__()


@pytest.fixture
def module():
    return Counts()


def test_a_case_runs_once(module):
    runs = EagerRuns(module)
    cases = [Case("one", (torch.ones(3),)), Case("one", (torch.ones(3),))]
    for case in (*cases, *cases):
        (step,) = runs.steps(case)
        torch.testing.assert_close(step.outputs, torch.full((3,), 2.0))
    assert module.calls == 2


def test_what_is_written_to_a_step_reaches_no_other(module):
    runs, case = EagerRuns(module), Case("one", (), {"x": torch.ones(3)})
    for _ in range(3):
        (step,) = runs.steps(case)
        torch.testing.assert_close(step.given["x"], torch.ones(3))
        torch.testing.assert_close(step.outputs, torch.full((3,), 2.0))
        step.given["x"].fill_(9)
        step.outputs.fill_(9)


@pytest.mark.parametrize(("more", "calls"), [(0, 1), (1, 2)])
def test_a_long_case_is_not_kept(module, monkeypatch, more, calls):
    monkeypatch.setattr(eager_runs, "KEPT_BYTES", 24)
    runs, case = EagerRuns(module), Case("one", (), {"x": torch.ones(3 + more)})
    runs.steps(case)
    runs.steps(case)
    assert module.calls == calls


def test_a_file_is_compared_with_the_calls_of_the_program(module, tmp_path):
    """`torch.export` and onnxruntime: as many calls of the module as for one of them."""
    report = export_onnx(module, (torch.ones(2, 3),), path=tmp_path / "m.onnx", cases=[]).report
    assert {result.runtime for result in report.cases} == {"torch.export", "onnxruntime"}
    before = module.calls
    both = export_onnx(module, (torch.ones(2, 3),), path=tmp_path / "n.onnx", cases=[Case("b", (torch.ones(2, 3),))])
    assert len(both.report.cases) == 4
    assert module.calls - before == before + 1


class Draws(torch.nn.Module):
    def __init__(self, draw, factor=1.0):
        super().__init__()
        self.draw, self.factor = draw, factor

    def forward(self, x):
        return x + self.factor * self.draw()


DRAWS = {
    "random": random.random,
    "numpy.random": np.random.rand,
    "random of a list": functools.partial(random.choice, range(10**6)),
    "numpy.random of a norm": np.random.standard_normal,
}


@pytest.mark.parametrize("kind", DRAWS)
def test_what_python_draws_is_a_constant_and_refused(kind):
    """A trace holds the number that it drew: each call of the program would have it."""
    source = kind.split(" ", maxsplit=1)[0]
    with pytest.raises(ReplayError, match=f"forward draws from {source}: program calls repeat the trace's numbers"):
        export_program(Draws(DRAWS[kind]), (torch.ones(3),))


def test_what_is_drawn_and_not_used_is_a_note():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    exported = export_program(Draws(random.random, 0.0), (torch.ones(3),))
    assert random.random() == expected
    assert any(note.startswith("forward draws from random:") for note in exported.report.remarks)
    assert torch.equal(exported(torch.zeros(4)), torch.zeros(4))


@functools.lru_cache
def places(length):
    return torch.arange(length).float()


class Remembered(torch.nn.Module):
    def forward(self, x):
        return x * places(x.shape[1])


def test_an_export_leaves_no_tensor_of_its_trace_in_a_cache_of_functions():
    """Sizes are no keys of a cache, so this length is fixed; the module itself computes with numbers afterwards."""
    x = torch.randn(2, 3)
    exported = export_program(Remembered(), (x,))
    assert torch.equal(exported(x), x * torch.arange(3))
    assert torch.equal(Remembered()(x), x * torch.arange(3))
    assert type(places(3)) is torch.Tensor


def test_small_models_compute_in_one_thread_and_threads_come_back():
    """Also after an error, and when a second export begins in between and ends last."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with contextlib.suppress(KeyError), eager_runs.in_one_thread(torch.nn.Linear(2, 2)):
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 3
        begun, ended, found = threading.Event(), threading.Event(), []

        def other():
            with eager_runs.in_one_thread(torch.nn.Linear(2, 2)):
                begun.set()
                ended.wait()
            found.append(torch.get_num_threads())

        thread = threading.Thread(target=other)
        with eager_runs.in_one_thread(torch.nn.Linear(2, 2)):
            thread.start()
            begun.wait()
        assert torch.get_num_threads() == 3
        ended.set()
        thread.join()
        assert found == [3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_large_models_compute_in_all_threads(monkeypatch):
    monkeypatch.setattr(eager_runs, "SAMPLED_FROM", 8)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with eager_runs.in_one_thread(torch.nn.Linear(2, 2)):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


class Given:
    def __init__(self, x, bias=None):
        self.x, self.bias = x, bias


class Adds(torch.nn.Module):
    def forward(self, given):
        return given.x if given.bias is None else given.x + given.bias


@pytest.fixture
def lossy():

    def keyed(obj):
        return [(pytree.GetAttrKey("x"), obj.x)], None

    register_class_flattening(Given, lambda obj: ([obj.x], None), lambda children, static: Given(*children), keyed)
    yield
    unregister_class_flattening(Given)


@pytest.mark.usefixtures("lossy")
@pytest.mark.parametrize("is_positional", [True, False])
def test_what_a_flatten_function_drops_fails_the_proof(is_positional, tmp_path):
    """Eagerly 6, and 1 in the program, which is never given the attribute."""
    given = Given(torch.ones(2, 3), torch.full((2, 3), 5.0))
    args, kwargs = ((given,), {}) if is_positional else ((), {"given": given})
    with pytest.raises(ReplayError, match="5"):
        export_program(Adds(), args, kwargs)
    with pytest.raises(ReplayError, match="5"):
        export_onnx(Adds(), args, kwargs, path=tmp_path / "adds.onnx")
    assert given.bias is not None


class Spoils(torch.nn.Module):
    """Writes to what it is given, also where no flatten function looks."""

    def forward(self, given):
        given.x += 1
        given.bias[0].mul_(2)
        given.bias.append(given.x)
        given.seen = given.x.sum()
        return given.x * 1


def test_the_objects_of_the_caller_are_afterwards_as_they_were():
    given = Given(torch.ones(2), [torch.ones(1)])
    given.lock, x, bias = threading.Lock(), given.x, given.bias
    (step,) = eager_steps(Spoils(), Case("spoils", (given,)))
    assert torch.equal(step.outputs, torch.full((2,), 2.0))
    assert vars(given).keys() == {"x", "bias", "lock"}
    assert given.x is x
    assert given.bias is bias
    assert len(bias) == 1
    assert (x.tolist(), bias[0].tolist()) == ([1.0, 1.0], [1.0])
    assert (x._version, bias[0]._version) == (0, 0)


def test_the_objects_of_the_caller_are_as_they_were_after_an_exception():

    class Stops(Spoils):
        def forward(self, given):
            super().forward(given)
            raise RuntimeError("half-way")

    given = Given(torch.ones(2), [torch.ones(1)])
    with pytest.raises(InvalidArgumentError, match="half-way"):
        eager_steps(Stops(), Case("stops", (), {"given": given}))
    assert (given.x.tolist(), len(given.bias), hasattr(given, "seen")) == ([1.0, 1.0], 1, False)
