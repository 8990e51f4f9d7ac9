"""The module computes a case once for all runtimes; what it writes to its inputs or its state is undone or kept."""

import contextlib
import copy
import functools
import random
import threading

import numpy as np
import onnxruntime
import pytest
import torch
import torch.utils._pytree as pytree

from tests.modules import module_class, module_of
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


@pytest.mark.parametrize(("rows", "calls"), [(3, 1), (4, 3)])
def test_what_is_written_to_a_step_reaches_no_other_and_a_long_case_is_not_kept(monkeypatch, rows, calls):
    monkeypatch.setattr(eager_runs, "KEPT_BYTES", 24)
    module = Counts()
    runs, case = EagerRuns(module), Case("one", (), {"x": torch.ones(rows)})
    for _ in range(3):
        (step,) = runs.steps(case)
        torch.testing.assert_close(step.given["x"], torch.ones(rows))
        torch.testing.assert_close(step.outputs, torch.full((rows,), 2.0))
        step.given["x"].fill_(9)
        step.outputs.fill_(9)
    assert module.calls == calls


def test_a_file_is_compared_with_the_calls_of_the_program(tmp_path):
    module, x = Counts(), torch.ones(2, 3)
    report = export_onnx(module, (x,), path=tmp_path / "m.onnx", cases=[]).report
    assert {result.runtime for result in report.cases} == {"torch.export", "onnxruntime"}
    before = module.calls
    both = export_onnx(module, (x,), path=tmp_path / "n.onnx", cases=[Case("b", (torch.ones(2, 3),))])
    assert len(both.report.cases) == 4
    assert module.calls - before == before + 1


DRAWS = {
    "random": functools.partial(random.choice, range(10**6)),
    "numpy.random": np.random.standard_normal,
}


@pytest.mark.parametrize("source", DRAWS)
def test_what_python_draws_is_a_constant_and_refused(source):
    """A trace holds the number that it drew: each call of the program would have it."""
    with pytest.raises(ReplayError, match=f"forward draws from {source}: program calls repeat the trace's numbers"):
        export_program(module_of(lambda self, x: x + DRAWS[source]()), (torch.ones(3),))


def test_what_is_drawn_and_not_used_is_a_note():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    exported = export_program(module_of(lambda self, x: x + 0.0 * random.random()), (torch.ones(3),))
    assert random.random() == expected
    assert any(note.startswith("forward draws from random:") for note in exported.report.remarks)
    assert torch.equal(exported(torch.zeros(4)), torch.zeros(4))


@functools.lru_cache
def places(length):
    return torch.arange(length).float()


Remembered = module_class("Remembered", lambda self, x: x * places(x.shape[1]))


def test_an_export_leaves_no_tensor_of_its_trace_in_a_cache_of_functions():
    """Sizes are no keys of a cache, so this length is fixed; the module itself computes with numbers afterwards."""
    x = torch.randn(2, 3)
    exported = export_program(Remembered(), (x,))
    assert torch.equal(exported(x), x * torch.arange(3))
    assert torch.equal(Remembered()(x), x * torch.arange(3))
    assert type(places(3)) is torch.Tensor


def test_small_models_compute_in_one_thread_and_threads_come_back(monkeypatch):
    """Also after an error, and when a second export begins in between and ends last; large ones have all threads."""
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
        monkeypatch.setattr(eager_runs, "SAMPLED_FROM", 8)
        with eager_runs.in_one_thread(torch.nn.Linear(2, 2)):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


class Given:
    def __init__(self, x, bias=None):
        self.x, self.bias = x, bias


Adds = module_class("Adds", lambda self, given: given.x if given.bias is None else given.x + given.bias)


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
    def __init__(self, stops):
        super().__init__()
        self.stops = stops

    def forward(self, given):
        given.x += 1
        given.bias[0].mul_(2)
        given.bias.append(given.x)
        given.seen = given.x.sum()
        if self.stops:
            raise RuntimeError("half-way")
        return given.x * 1


@pytest.mark.parametrize("stops", [False, True])
def test_the_objects_of_the_caller_are_afterwards_as_they_were_also_after_an_exception(stops):
    given = Given(torch.ones(2), [torch.ones(1)])
    given.lock, x, bias = threading.Lock(), given.x, given.bias
    if stops:
        with pytest.raises(InvalidArgumentError, match="half-way"):
            eager_steps(Spoils(stops), Case("spoils", (), {"given": given}))
    else:
        (step,) = eager_steps(Spoils(stops), Case("spoils", (given,)))
        assert torch.equal(step.outputs, torch.full((2,), 2.0))
    assert vars(given).keys() == {"x", "bias", "lock"}
    assert given.x is x
    assert given.bias is bias
    assert len(bias) == 1
    assert (x.tolist(), bias[0].tolist()) == ([1.0, 1.0], [1.0])
    assert (x._version, bias[0]._version) == (0, 0)


class Scaled(torch.nn.Module):
    """Writes a number into a buffer, as rotary embeddings do, and multiplies by it: 1.0, and 2.0 for larger inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.factor.copy_(torch.where(x.max() > 1, 2.0, 1.0).expand(3))
        return x * self.factor


class Counting(torch.nn.Module):
    def __init__(self, persistent: bool | None = False):
        super().__init__()
        if persistent is None:
            self.calls = torch.zeros(3)
        else:
            self.register_buffer("calls", torch.zeros(3), persistent=persistent)

    def forward(self, x):
        self.calls.add_(1)
        return x * self.calls


class TwoNames(Counting):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", self.calls, persistent=False)

    def forward(self, x):
        self.seen.add_(1)
        return x * self.calls


class Replaced(Counting):
    def forward(self, x):
        self.register_buffer("calls", self.calls + 1, persistent=False)
        return x * self.calls


KINDS = [lambda: Counting(True), Counting, lambda: Counting(None), TwoNames, Replaced]


def test_a_program_writes_a_buffer_that_is_not_persistent_and_a_file_computes_it(tmp_path):
    exported = export_onnx(Scaled(), (torch.ones(2, 3),), path=tmp_path / "scaled.onnx")
    assert exported.report.remarks[0].startswith("forward writes to factor")
    session = onnxruntime.InferenceSession(tmp_path / "scaled.onnx")
    for scale, factor in ((1.0, 1.0), (5.0, 2.0)):
        x, wanted = torch.full((4, 3), scale), torch.full((4, 3), scale * factor)
        assert torch.equal(exported(x), wanted)
        assert torch.equal(torch.tensor(session.run(None, {"x": x.numpy()})[0]), wanted)


@pytest.mark.parametrize("kind", KINDS, ids=["persistent", "not persistent", "no buffer", "two names", "replaced"])
def test_a_program_goes_on_from_call_to_call_and_the_module_is_as_it_was(kind):
    """The program keeps what it writes, wherever the module holds it: 1, 2, 3 times the input.

    Trace, replays and calls leave every tensor of the module with its identity and its numbers.
    """
    module = kind()
    tensors = {**vars(module), **module._buffers}
    before = str(copy.deepcopy(tensors))
    exported = export_program(module, (torch.ones(2, 3),), cases=[Case("five rows", (torch.ones(5, 3),))])
    assert [exported(torch.ones(1, 3)).tolist() for _ in range(3)] == [[[count] * 3] for count in (1.0, 2.0, 3.0)]
    after = {**vars(module), **module._buffers}
    assert all(after[name] is value for name, value in tensors.items())
    assert str(after) == before


def _counts(self, x):
    self.calls = self.calls + 1
    return x * self.calls


def test_a_number_that_changes_from_call_to_call_is_refused_unless_it_changes_nothing():
    """A program has the number of the trace: its second call would give 1 times the input, the module's 2 times."""
    counts = {"forward": _counts, "calls": 0}  # an attribute that is no tensor
    module = type("PlainNumber", (torch.nn.Module,), counts)()
    with pytest.raises(ReplayError, match=r"largest difference 1\.0e\+00"):
        export_program(module, (torch.ones(2, 3),))
    assert "calls" not in vars(module), "the trace left it there"

    def notes(self, x):
        self.length = x.shape[0]
        return x + 1

    module = module_of(notes)
    exported = export_program(module, (torch.ones(2, 3),), cases=[Case("five rows", (torch.ones(5, 3),))])
    assert exported.report.ok
    assert "length" not in vars(module)
