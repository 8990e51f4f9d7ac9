"""The matrix: its runner survives anything, resumes, and pages say what results say; the search over operators."""

import dataclasses
from pathlib import Path

import pytest
import torch
import transformers

from matrix import __main__ as command_line
from matrix import command, cut_page, genai, operators, oracle_page, real, runtimes_page, trainings_page
from matrix.cases import COLUMNS as ALL_COLUMNS
from matrix.models import layer_classes, make_model, type_names
from matrix.operators_cases import Operator, Values
from matrix.operators_cases import operators as all_operators
from matrix.page import in_two, page_of
from matrix.results import Results, failures, recorded_file, regressions
from matrix.runner import Limits, Runner, read_events, sample
from matrix.trainings_cases import run_type
from matrix.ways import WAYS

from .test_matrix_fakes import load_fake, run_fake

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parent.parent / "docs"
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0"}
COLUMNS = ["built", "round trip", "export"]
OK = {"ok": True, "seconds": 1.0}
# one type of every kind of cache layer in transformers 5.23 that is quick to build
SAMPLE = ["llama", "mistral", "gemma2", "qwen3_next", "falcon_h1", "deepseek_v32", "mamba", "nemotron_h"]


@pytest.fixture
def runner():
    return Runner("yobx_flatten", Limits(seconds=60.0, gigabytes=64.0), run_fake, load_fake, preload=())


@pytest.mark.parametrize("name", SAMPLE)
def test_a_small_model_is_built_of_every_kind(name):
    model = make_model(name)
    assert sum(weight.numel() for weight in model.parameters()) < 5e6
    assert layer_classes(name)


def test_the_sample_of_types_covers_all_layer_classes_first():
    chosen = sample([*SAMPLE, "phi3", "qwen2"], layer_classes, len(SAMPLE))
    names = type_names()
    assert len(names) == len(set(names))
    assert {"llama", "seq2seq:t5", "speech:whisper"} <= set(names)
    kinds = [layer_classes(name) for name in chosen]
    assert len(set(kinds)) == len({layer_classes(name) for name in [*SAMPLE, "phi3", "qwen2"]})


def test_a_type_that_works_has_a_result_per_column_and_one_that_dies_stops_no_other(runner):
    results = runner.run_type("works", [*COLUMNS, "save and load"], {"earlier": True})
    assert [results[column]["ok"] for column in COLUMNS] == [True, True, True]
    assert results["export"]["known"] == {"earlier": True}
    assert results["save and load"] == {"ok": True, "way": "yobx_flatten", "seconds": 0.6}
    found = dict(runner.run_types([(name, COLUMNS, {}) for name in ("crashes", "works", "fails")], jobs=2))
    passed = {name: results["round trip"]["ok"] for name, results in found.items()}
    assert passed == {"crashes": False, "works": True, "fails": False}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("crashes", "SIGSEGV: the process was ended by a signal"),
        ("exits", "exit code 1: no more"),
        ("eats", "exit code 1: MemoryError"),
        ("fails", "ValueError: wrong"),
        ("hangs", "TimeoutError: more than 5 seconds"),
    ],
)
def test_what_ends_a_process_is_recorded_where_it_happened(runner, name, why, tmp_path):
    if name == "hangs":
        runner = Runner("yobx_flatten", Limits(seconds=5.0, gigabytes=64.0), run_fake, load_fake, preload=())
    results = runner.run_type(name, COLUMNS, {})
    assert results["built"]["ok"] is True
    assert results["round trip"]["ok"] is False
    assert results["round trip"]["why"] == why
    assert results["export"]["ok"] is (True if name == "fails" else None)
    assert name == "fails" or results["export"]["why"] == "round trip ended the process"
    # one that reports nothing fails in its first column
    found = read_events(tmp_path, COLUMNS, "exit code 3", 2.0)["built"]
    assert found == {"ok": False, "why": "exit code 3", "seconds": 2.0}


@pytest.fixture
def results(tmp_path):
    results = Results(tmp_path / "matrix.json", VERSIONS, "yobx_flatten")
    results.record("llama", dict.fromkeys(COLUMNS, OK), "state1")
    failed = {"ok": False, "why": "ValueError: axis 3", "seconds": 1.0}
    results.record("odd", {"built": OK, "round trip": OK, "export": failed}, "state1")
    results.record("even", {"built": OK, "round trip": OK, "export": {**failed, "why": "ValueError: axis 4"}}, "state2")
    return results


def test_results_come_back_for_the_same_versions_and_others_are_not_replaced_unasked(results):
    assert Results.open(results.path, VERSIONS, "yobx_flatten").types == results.types
    assert Results.open(results.path, {**VERSIONS, "torch": "2.14.0"}, "yobx_flatten").types == {}
    assert Results.open(results.path, VERSIONS, "executorch").types == {}
    results.versions = {**VERSIONS, "torch": "0.1"}
    results.write()
    with pytest.raises(SystemExit, match=r"was made with python 3\.11\.7, torch 0\.1.*name another --output"):
        command_line.main(["--only", "llama", "--output", str(results.path)])


@pytest.mark.parametrize(
    ("redo", "expected"),
    [
        (None, {"new": COLUMNS}),
        ("all", {"llama": COLUMNS, "odd": COLUMNS, "even": COLUMNS, "new": COLUMNS}),
        ("failed", {"odd": COLUMNS, "even": COLUMNS, "new": COLUMNS}),
        ("outdated", {"even": COLUMNS, "new": COLUMNS}),
    ],
)
def test_what_is_recorded_is_not_run_again_unless_asked_for(results, redo, expected):
    work = command.work_left(results, ["llama", "odd", "even", "new"], COLUMNS, redo, "state1")
    assert {name: columns for name, columns, _ in work} == expected
    assert failures(results, COLUMNS) == {"export": {"ValueError: axis #": ["even", "odd"]}}  # they differ in a number
    work = list(command.work_left(results, ["llama"], [*COLUMNS, "onnx"], None, "state1"))
    assert work == [("llama", ["onnx"], dict.fromkeys(COLUMNS, True))]  # a new column alone


def test_a_cut_into_larger_pieces_is_named(results, tmp_path):
    """It computes what the model does, so that its column passes; more calls than before are no fault."""
    recorded = Results(tmp_path / "recorded.json", {}, "roundpipe_runtime")
    for name, before, now in (("t5", 4, 2), ("llama", 2, 2), ("blt", 8, 10)):
        recorded.record(name, {"cut": {"ok": True, "calls": before}}, "s")
        results.record(name, {"cut": {"ok": True, "calls": now}}, "s")
    assert regressions(results, recorded, ["t5", "llama", "blt"]) == ["t5, cut: 2 calls of layers, not 4"]


def test_a_training_that_no_longer_runs_by_microbatches_is_named(results, tmp_path):
    """Its numbers are right, but it needs the memory of the whole batch."""
    recorded = Results(tmp_path / "recorded.json", {}, "roundpipe_runtime")
    whole, joined = "A layer ... So such batches run in one microbatch.", "So the loss runs once for the whole batch."
    for name, before, now in (("t5", [], [whole]), ("llama", [whole], [joined]), ("blt", [], [])):
        recorded.record(name, {"called": {"ok": True, "notes": before}}, "s")
        results.record(name, {"called": {"ok": True, "notes": now}}, "s")
    said = ["t5, called: in one microbatch, not by microbatches"]
    assert regressions(results, recorded, ["t5", "llama", "blt"]) == said


def test_deferred_checks_are_a_way_of_their_own_with_results_of_their_own(capsys):
    options = command_line.parse(["--deferred"])
    assert (options.way, WAYS[options.way].deferred) == ("yobx_flatten-deferred", True)
    assert options.output.stem == f"matrix-deferred-{transformers.__version__}"
    assert command_line.parse([]).way == "yobx_flatten"
    with pytest.raises(SystemExit):
        command_line.parse(["--deferred", "--peer", "executorch"])
    assert "--deferred is for this package" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command_line.parse(["--columns", "exprot"])
    assert "exprot is not a column; they are built, prefill" in capsys.readouterr().err


def page_of_matrix(results, name):
    """Numbers in the page come from the file: `python -m matrix --page docs/matrix.md` writes it."""
    peers = [Results.read(path) for path in sorted((DOCS / "data").glob(f"{name.removesuffix('.json')}-*.json"))]
    return page_of(results, list(ALL_COLUMNS), peers, name)


# of a page: its results, what makes it of them, and whether its rows are in a file of their own
PAGES = {
    "matrix": ("matrix-*", page_of_matrix, True), "cut_matrix": ("cut-*", cut_page.page_of, True),
    "trainings": ("trainings-*", trainings_page.page_of, True),
    "runtimes": ("runtimes-*", runtimes_page.page_of, True), "genai": ("genai-*", genai.page_of, False),
    "operators": ("operators-*", operators.page_of, False), "oracle": ("oracle-*", oracle_page.page_of, False),
    "real": ("real-*", real.page_of, False),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_the_one_of_the_committed_results(name):
    pattern, make, has_rows = PAGES[name]
    path = [path for path in sorted((DOCS / "data").glob(f"{pattern}.json")) if path.stem.count("-") == 1][-1]
    expected = make(Results.read(path), path.name)
    committed = tuple(
        (DOCS / folder / f"{name}.md").read_text(encoding="utf-8") for folder in ("", "rows")[: 1 + has_rows]
    )
    assert committed == (in_two(name, expected) if has_rows else (expected,))


# The page reads warnings of the package, so each reading is held by a training that warns.
OUTCOMES = {
    "own_loss:cross entropy (a mean stated as a sum)": "refused",
    "pretraining:AlbertForPreTraining": "equal in one microbatch",
    "zero_shot_image_classification:CLIPModel": "equal, joined loss",
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_page_of_trainings_reads_the_warnings_of_the_package(name, tmp_path):
    with (tmp_path / "events.jsonl").open("w", encoding="utf-8") as events:
        run_type(name, "roundpipe_runtime", ["built", "3 microbatches"], {}, None, events)
    found = read_events(tmp_path, ["built", "3 microbatches"], None, 0.0)
    assert trainings_page.outcome_of({"columns": found}) == OUTCOMES[name]


# a few of every kind, and those that torch's exporter gets wrong or does not know
OPERATORS = ("atan2", "logsigmoid", "cummax", "bce with logits, weights", "cdist 2", "attention, bool mask", "chunk")


def _named(name):
    return next(one for one in all_operators() if one.name == name)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # of torch's own TransformerEncoder
def test_each_operator_has_a_name_of_its_own_and_runs():
    every = all_operators()
    assert len({one.name for one in every}) == len(every) >= 134
    assert Results.read(recorded_file("operators")).types.keys() == {one.name for one in every}
    for one in every:
        one.module()(*one.example)
        assert all(len(values.inputs) == len(one.example) for values in one.others), one.name
    assert sum(bool(one.others) for one in every) > 0.9 * len(every)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_that_were_repaired_are_right(name):
    found = operators.measured(_named(name))
    assert (found["verdict"], found["why"]) == ("right", "")


def test_a_file_that_is_wrong_is_found_and_values_that_eager_refuses_are_left_out():
    """NaN has no sign in PyTorch, and one in the file: a value that no export tries."""
    found = operators.measured(_named("sign"))
    assert (found["ok"], found["verdict"]) == (False, "wrong")
    assert found["why"].startswith("NaN: 0 eager, nan in the file")
    table = torch.rand(3, 2)
    outside = Values("outside", (table, torch.tensor([7])))
    one = Operator("index_select", "of indices", lambda x, i: x.index_select(0, i), (table, torch.tensor([1, 2])), ())
    assert operators.measured(dataclasses.replace(one, others=(outside,)))["verdict"] == "right"


def test_what_is_recorded_is_not_run_again(tmp_path, monkeypatch):
    path, ran = tmp_path / "operators.json", []
    measured = {"ok": True, "verdict": "right", "why": "", "seconds": 0.1}
    monkeypatch.setattr(operators, "measured", lambda one: ran.append(one.name) or measured)
    for _ in range(2):
        assert operators.main(["--only", "atan", "--output", str(path)]) == 0
    assert ran == [one.name for one in all_operators() if "atan" in one.name]
    assert operators.main(["--only", "atan", "--output", str(path), "--page", str(tmp_path / "page.md")]) == 0
    assert f"| right | {len(ran)} |" in (tmp_path / "page.md").read_text()
