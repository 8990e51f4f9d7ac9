"""What a call leaves in its arguments comes out of the program and of its files, or the report says so."""

import collections
import copy
import dataclasses

import onnxruntime
import pytest
import torch
import torch.utils._pytree as pytree
from transformers import LlamaConfig, LlamaForCausalLM

from tests.modules import module_class, module_of
from yobx_flatten import export_onnx, export_program, pytree_dataclass, register_flattening_functions
from yobx_flatten.errors import GenerationError, RoundTripError
from yobx_flatten.export.calls import prove_program
from yobx_flatten.huggingface.cache_names import cache_of, installed_name
from yobx_flatten.runners.open import open_runner


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


class Counts(torch.nn.Module):
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
        Counts,
        lambda: {"x": torch.randn(2, 4), "memory": RowsCache(torch.zeros(2, 4))},
        {"present.memory.rows": lambda left: left["memory"].rows},
    ),
]
KINDS = pytest.mark.parametrize(
    ("module", "make", "present"), ALL, ids=["tensor", "dataclass", "list and dict", "cache"]
)


def same(one, other):
    leaves, spec = pytree.tree_flatten(one)
    others, other_spec = pytree.tree_flatten(other)
    assert spec == other_spec
    for leaf, found in zip(leaves, others, strict=True):
        torch.testing.assert_close(found, leaf, atol=1e-6, rtol=0)


@KINDS
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
    report = getattr(program, method)(tmp_path / f"m.{ending}")
    assert report.output_names == ["y", "present.cache"]


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


@KINDS
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
