"""The module computes a case once for all runtimes; what it writes to its inputs or its state is undone or kept."""

import collections
import contextlib
import copy
import dataclasses
import functools
import random
import threading

import numpy as np
import onnxruntime
import pytest
import torch
import torch.utils._pytree as pytree
from transformers import LlamaConfig, LlamaForCausalLM

from tests.modules import module_class, module_of
from yobx_flatten import register_class_flattening, register_flattening_functions, unregister_class_flattening
from yobx_flatten.declare import pytree_dataclass
from yobx_flatten.errors import GenerationError, InvalidArgumentError, ReplayError, RoundTripError
from yobx_flatten.export import Case, export_onnx, export_program, prove_program
from yobx_flatten.export.proof import eager_runs
from yobx_flatten.export.proof.eager_runs import EagerRuns, eager_steps
from yobx_flatten.huggingface.cache_names import cache_of, installed_name
from yobx_flatten.runners.open import open_runner


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


DRAWS = {"random": functools.partial(random.choice, range(10**6)), "numpy.random": np.random.standard_normal}


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
    assert torch.equal(export_program(Remembered(), (x,))(x), x * torch.arange(3))
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
    """The program keeps what it writes, wherever the module holds it: 1, 2, 3 times the input."""
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
    assert export_program(module, (torch.ones(2, 3),), cases=[Case("five rows", (torch.ones(5, 3),))]).report.ok
    assert "length" not in vars(module)


class Written(torch.nn.Module):
    """Writes into a tensor among the inputs, as gpt-fast does."""

    def __init__(self):
        super().__init__()
        self.key = torch.nn.Linear(4, 4)

    def forward(self, x, place, cache):
        cache[:, place] = self.key(x)
        return {"y": cache.sum(1)}


@pytree_dataclass
@dataclasses.dataclass
class Slots:
    keys: torch.Tensor
    places: list


class Sliced(torch.nn.Module):
    def forward(self, x, slots):
        slots.keys.index_copy_(1, torch.tensor([2, 0]), x)
        slots.keys[..., 1:].mul_(0.5)
        slots.places[0][:, 0] += 1
        return slots.keys.sum(1) + slots.places[0].sum()


class Logged(torch.nn.Module):
    def forward(self, x, log, state):
        log.append(x * 2)
        state["new"] = x + 1
        state["old"] = state["old"] + x
        del state["gone"]
        return x + 1, x - 1


@pytree_dataclass
@dataclasses.dataclass
class RowsCache:
    rows: torch.Tensor
    count: int = 0


class CountsCalls(torch.nn.Module):
    def forward(self, x, memory):
        memory.rows = memory.rows + x
        return memory.rows.mean(-1)


def _written():
    return {"x": torch.randn(2, 2, 4), "place": torch.tensor([0, 1]), "cache": torch.zeros(2, 8, 4)}


def _sliced():
    return {"x": torch.randn(2, 2, 4), "slots": Slots(torch.zeros(2, 8, 4), [torch.zeros(3, 2, dtype=torch.int64)])}


# class, its arguments, and what a call leaves in them
ALL = [
    (Written, _written, {"present.cache": lambda left: left["cache"]}),
    (
        Sliced,
        _sliced,
        {
            "present.slots.keys": lambda left: left["slots"].keys,
            "present.slots.places.0": lambda left: left["slots"].places[0],
        },
    ),
    (
        Logged,
        lambda: {
            "x": torch.randn(2, 4),
            "log": [torch.zeros(3)],
            "state": {"old": torch.ones(2, 4), "gone": torch.ones(2)},
        },
        {
            "present.log.1": lambda left: left["log"][1],
            "present.state.old": lambda left: left["state"]["old"],
            "present.state.new": lambda left: left["state"]["new"],
        },
    ),
    (
        CountsCalls,
        lambda: {"x": torch.randn(2, 4), "memory": RowsCache(torch.zeros(2, 4))},
        {"present.memory.rows": lambda left: left["memory"].rows},
    ),
]
ARGUMENTS = pytest.mark.parametrize(
    ("module", "make", "present"), ALL, ids=["tensor", "dataclass", "list and dict", "cache"]
)


def same(one, other):
    leaves, spec = pytree.tree_flatten(one)
    others, other_spec = pytree.tree_flatten(other)
    assert spec == other_spec
    for leaf, found in zip(leaves, others, strict=True):
        torch.testing.assert_close(found, leaf, atol=1e-6, rtol=0)


@ARGUMENTS
def test_a_program_leaves_what_the_module_does_and_a_file_returns_it(module, make, present, tmp_path):
    model = module().eval()
    exported = export_onnx(model, kwargs=make(), path=tmp_path / "m.onnx")
    report = exported.report
    (note,) = [remark for remark in report.remarks if "does not return the result" in remark]
    assert all(name in note for name in present)
    assert "loop=False" in note
    assert [name for name in report.output_names if name.startswith("present.")] == [*present]
    assert all(set(case.differences) >= set(present) for case in report.cases)
    torch.manual_seed(1)
    theirs = make()
    ours = copy.deepcopy(theirs)
    identity = [id(value) for value in ours.values()]
    values = [leaf.numpy().copy() for leaf in pytree.tree_leaves(theirs) if isinstance(leaf, torch.Tensor)]
    with torch.no_grad():
        expected, found = model(**theirs), exported(**ours)
    assert type(found) is type(expected)
    same(expected, found)
    same(theirs, ours)
    assert [id(value) for value in ours.values()] == identity
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    taken = {one.name for one in session.get_inputs()}
    feeds = zip(report.input_names, values, strict=True)
    found = session.run(None, {name: value for name, value in feeds if name in taken})
    wanted = [*pytree.tree_leaves(expected), *(leaf(theirs) for leaf in present.values())]
    torch.testing.assert_close([*map(torch.from_numpy, found)], wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("suffix", ["to_aotinductor.pt2", "to_openvino.xml"])
def test_files_of_other_runtimes_return_it_too(suffix, tmp_path):
    method, _, ending = suffix.partition(".")
    if method == "to_openvino":
        pytest.importorskip("openvino")
    program = export_program(Written().eval(), kwargs=_written())
    assert getattr(program, method)(tmp_path / f"m.{ending}").output_names == ["y", "present.cache"]


def test_a_program_of_positional_arguments_leaves_the_same():
    model, given = Written().eval(), tuple(_written().values())
    program = export_program(model, copy.deepcopy(given))
    ours = copy.deepcopy(given)
    with torch.no_grad():
        same(model(*given), program(*ours))
    same(given, ours)


def test_what_is_returned_anyway_is_not_returned_twice():
    class Returns(torch.nn.Module):
        def forward(self, x, cache, log):
            cache.add_(x)
            log.append(x)
            return {"y": cache * 2, "cache_now": cache, "log_now": log}

    report = export_program(Returns(), kwargs={"x": torch.ones(2, 3), "cache": torch.zeros(2, 3), "log": []}).report
    assert not any("does not return" in remark for remark in report.remarks)
    assert not any(name.startswith("present.") for name in report.output_names)


@ARGUMENTS
def test_without_a_loop_the_report_says_what_is_lost(module, make, present, tmp_path):
    """So it is with a program of torch.export, which was traced by other code, and returns what it returns."""
    model = module().eval()
    report = export_onnx(model, kwargs=make(), path=tmp_path / "m.onnx", loop=False).report
    assert not any(name.startswith("present.") for name in report.output_names)
    with register_flattening_functions():
        given = prove_program(torch.export.export(model, (), make()), model).report
    for remarks in (report.remarks, given.remarks):
        (note,) = [remark for remark in remarks if "does not return the change" in remark]
        assert next(iter(present)).split(".")[1] in note


def test_an_attribute_that_no_field_holds_is_refused():
    def notes(self, x, slots):
        slots.seen = x.sum()
        return x + slots.keys.sum()

    with pytest.raises(RoundTripError, match=r"has the attribute 'seen'"):
        export_program(module_of(notes), kwargs=_sliced())


def test_a_module_that_reads_a_cache_for_a_score_names_the_option(tmp_path):
    scores = lambda self, x, past_key_values: (x @ past_key_values[0]["key"].mT).amax(-1)  # noqa: E731 # a forward
    reads = module_class("Reads", scores)()
    given = {
        "x": torch.randn(2, 3, 4),
        "past_key_values": [{"key": torch.randn(2, 5, 4), "value": torch.randn(2, 5, 4)}],
    }
    with pytest.raises(GenerationError, match=r"Reads takes past_key_values\.0\.key .*\n    loop=False$"):
        export_onnx(reads, kwargs=given, path=tmp_path / "m.onnx")
    report = export_onnx(reads, kwargs=given, path=tmp_path / "m.onnx", loop=False).report
    assert report.output_names == ["output"]
    assert export_program(reads, kwargs=given, loop=False).to_onnx(tmp_path / "n.onnx").ok
    runner = open_runner(tmp_path / "n.onnx")
    cache = {f"past_key_values.0.{name}": leaf for name, leaf in given["past_key_values"][0].items()}
    assert torch.allclose(runner.run({"x": given["x"], **cache})["output"], reads(**given), atol=1e-5)
    with pytest.raises(GenerationError, match=r"takes past_key_values\.0\.key and does not return"):
        runner.step({"x": given["x"]}, runner.cache(cache))


@pytest.mark.slow
def test_a_program_extends_the_cache_of_its_caller_and_a_file_returns_it(tmp_path):
    class Scores(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
            self.lm = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.5))

        def forward(self, input_ids, past_key_values):
            return {"y": self.lm(input_ids, **{installed_name(): past_key_values}).logits}

    def given():
        with torch.no_grad():
            cache = cache_of(scores.lm(torch.arange(10).view(2, 5) + 3))
        return {"input_ids": torch.tensor([[5, 6], [7, 8]]), "past_key_values": cache}

    scores = Scores().eval()
    exported = export_onnx(scores, kwargs=given(), path=tmp_path / "m.onnx")
    ours, theirs = given(), given()
    for token in range(3):
        ids = {"input_ids": torch.tensor([[20 + token], [30 + token]])}
        with torch.no_grad():
            expected, found = scores(**(theirs | ids)), exported(**(ours | ids))
        assert found.keys() == {"y"}
        torch.testing.assert_close(found["y"], expected["y"], atol=1e-4, rtol=0)
    assert ours["past_key_values"].get_seq_length() == 8
    presents = [f"present.{layer}.{leaf}" for layer in (0, 1) for leaf in ("key", "value")]
    assert exported.report.output_names == ["y", *presents]
    steps = [(case.runtime, case.steps) for case in exported.report.cases if case.case == "the example"]
    assert steps == [("torch.export", 3), ("onnxruntime", 3)]


def _queued(self, x, queue):
    queue.append(x * 2)
    return sum(queue)


@pytest.mark.parametrize("make", [list, collections.deque, lambda items: collections.deque(items, maxlen=4)])
def test_a_queue_grows_as_in_the_module(make):
    exported = export_program(module_of(_queued), (torch.ones(3), make([torch.ones(3)])))
    x, first = torch.randn(3), torch.randn(3)
    found, expected = make([first]), make([first])
    assert torch.equal(exported(x, found), module_of(_queued)(x, expected))
    assert type(found) is type(expected)
    assert [one.tolist() for one in found] == [one.tolist() for one in expected]
