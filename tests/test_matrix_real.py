"""The pages of exporters and of trained models show what was recorded; verdicts and measures are those of formulas."""

import json
import math
from pathlib import Path

import pytest
import torch

from matrix import real_llama_cpp, real_runtimes, real_speed
from matrix.cases import DifferenceError
from matrix.command import work_left
from matrix.oracle import parse
from matrix.oracle_cases import RANKS, TYPES, judged, run_type
from matrix.oracle_exporters import EXPORTERS
from matrix.oracle_page import NOT_RUN, small_table, verdict_of
from matrix.real_cases import FORMS, RealTrial, divergence, perplexity
from matrix.real_embeddings import FORMS as EMBEDDING_FORMS
from matrix.real_embeddings import sentences
from matrix.real_sound import FORMS as SOUND_FORMS
from matrix.real_texts import write_chats
from matrix.real_training import STEM
from matrix.real_training_cases import BAR, TASKS
from matrix.results import Results, recorded_file
from matrix.runner import Limits, Runner
from yobx_flatten import CaseResult, ExportReport, VerifiedFile, export_folder
from yobx_flatten.model_folder.source.configuration import small_model


def test_every_form_is_recorded_and_the_forms_of_this_package_pass():
    types = Results.read(recorded_file("real")).types
    assert sorted(types) == sorted(FORMS)
    failed = {
        f"{name}, {column}: {result['why']}"
        for name, entry in types.items()
        for column, result in entry["columns"].items()
        if result["ok"] is not True and FORMS[name].genai is None
    }
    assert not failed


def test_measures_are_those_of_their_formulas_and_a_form_too_far_from_the_model_fails(tmp_path):
    """A uniform guess among 8 has a perplexity of 8; the divergence of two coins is an analytic sum."""
    assert perplexity(torch.zeros(5, 8), torch.tensor([3, 1, 4, 1, 5])) == pytest.approx(8)
    fair, bent = torch.tensor([[0.0, 0.0]]), torch.log(torch.tensor([[0.9, 0.1]]))
    wanted = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert divergence(fair, bent) == pytest.approx(wanted, rel=1e-6)
    trial = RealTrial("other weights int4 fused", tmp_path)
    assert trial.near({"tokens": 0.95, "compared": 100})["tokens"] == 0.95
    with pytest.raises(DifferenceError, match=r"94\.0% of 100 tokens are the model's; at least 95%"):
        trial.near({"tokens": 0.94, "compared": 100})


def test_every_training_is_recorded_and_passes():
    types = Results.read(recorded_file(STEM)).types
    assert sorted(types) == sorted(TASKS)
    for name, entry in types.items():
        columns = entry["columns"]
        assert columns["trained"]["ok"] is True, name
        assert columns["trained"]["difference"] <= BAR
        assert columns["trained"]["plain"]["held_out_before"] > columns["trained"]["pipeline"]["held_out"]
        for column in ("resumed", "exported"):
            assert columns[column]["ok"] is (True if TASKS[name].chat else None), (name, column)
        assert columns["a tenth"]["trains"] is False


def test_every_form_of_the_encoder_is_recorded_near_enough_and_small():
    forms = json.loads(recorded_file("embeddings").read_text(encoding="utf-8"))["forms"]
    assert {*EMBEDDING_FORMS} < {*forms}
    assert all(forms[name]["least"] >= least for name, (_, least) in EMBEDDING_FORMS.items())
    (dynamic,) = {*forms} - {*EMBEDDING_FORMS}
    assert forms["int8"]["bytes"] < 24e6
    assert forms["int8"]["least"] > forms[dynamic]["least"]
    assert forms["int8"]["all"] < 0.7 * forms["float32"]["all"]
    found = sentences()
    assert len(found) == len({*found}) == 100


def test_conversations_made_of_a_text_have_a_question_and_an_answer(tmp_path):
    write_chats(tmp_path / "chats.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 40
    assert rows[0]["prompt"][0]["content"] == TASKS["chat"].prompt
    assert rows[0]["completion"][0]["content"].startswith("Assert statements are a convenient way to insert debugging")
    assert all(12 < len(row["completion"][0]["content"].split()) <= 40 for row in rows)


def test_two_files_are_timed_by_turns_and_shown_with_their_ratio(tmp_path):
    export_folder(small_model("llama"), tmp_path / "folder", optimize="onnxruntime")
    path = tmp_path / "folder" / "model.onnx"
    calls = {"a token": (2, 1, 6), "a prompt": (1, 5, 0)}
    found = real_speed.measured(path, path, calls)
    assert sorted(found) == sorted(calls)
    assert all(time >= 0 for times in found.values() for time in times)
    times = {name: [3.0, 4.0] for name in real_speed.CALLS}
    assert "| 3, 4: 0.75 |" in real_speed.section_of({"pairs": {"int4": times}, "versions": {}}, "speed.json")


@pytest.mark.parametrize("layout", ["transformers", "genai"])
def test_folders_take_turns_in_processes_of_their_own_and_one_of_genai_in_its_own_loop(tmp_path, layout):
    options, module = {}, {}
    if layout == "genai":
        pytest.importorskip("onnxruntime_genai")
        options, module = {"layout": "genai"}, {"module": "matrix.real_loops"}
    export_folder(small_model("llama"), tmp_path / "folder", optimize="onnxruntime", **options)
    names = ("one", "other") if layout == "transformers" else ("genai",)
    folders = {name: real_runtimes.opened(tmp_path / "folder", **module) for name in names}
    found = real_runtimes.measured(folders, [4, 9], rounds=1)
    for folder in folders.values():
        assert {"torch", "onnxruntime"} <= folder.facts.keys()
        folder.close()
    assert {name: [*times] for name, times in found.items()} == {name: ["4", "9"] for name in names}
    assert min(time for times in found.values() for time in times.values()) > 0


def test_every_form_of_the_whisper_writes_the_model_s_text_and_llama_cpp_is_timed_where_npm_is(tmp_path, monkeypatch):
    found = json.loads(recorded_file("whisper").read_text(encoding="utf-8"))
    assert set(found["forms"]) <= set(SOUND_FORMS)
    assert "float32" in found["forms"]
    for name, held in found["forms"].items():
        assert held["tokens"] >= SOUND_FORMS[name].tokens, name
        assert (held["text"] == found["model"]["text"]) or SOUND_FORMS[name].tokens < 1, name
    assert found["model"]["compared"] > 20
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="needs npm"):
        real_llama_cpp.install(tmp_path / "packages")
    assert not (tmp_path / "packages").exists()


DOCS = Path(__file__).parent.parent / "docs"


def test_no_cell_of_ours_is_worse_and_a_file_is_called_wrong_only_next_to_two_computations():
    """Both are ten times further from the file than from each other, or the file returns other shapes."""
    results = Results.read(recorded_file("oracle"))
    assert (DOCS / "tables" / "oracle.md").read_text(encoding="utf-8") == small_table(results) + "\n"
    assert set(results.types) <= set(TYPES)
    ranks = [*RANKS, NOT_RUN]
    verdicts = {name: [verdict_of(results, name, one) for one in EXPORTERS] for name in results.types}
    own = {name: verdict_of(results, name, "yobx-flatten") for name in results.types}
    assert {name for name in own if own[name] != min(verdicts[name], key=ranks.index)} == set()
    for name, entry in results.types.items():
        for exporter, result in entry["columns"].items():
            if result.get("verdict") == "wrong values":
                apart = result["apart"]
                near = min(apart["float32"], apart["float64"]) if apart else 1.0
                assert near > 10 * apart.get("between", 0.0), (name, exporter)


def found(*cases, remarks=()):
    report = ExportReport("Model", tolerance=1e-4)
    report.cases += [CaseResult(name, "onnxruntime", 1, {"y": off}, 0.0, error) for name, off, error in cases]
    report.remark(*remarks)
    return VerifiedFile("a call", report)


RIGHT = ("the example", 1e-6, None)
JUDGED = {
    "right": found(RIGHT, ("batch 3", 1e-5, None)),
    "right at some sizes only": found(("the example", 0.0, "step 0: Fail: dimensions"), ("batch 3", 0.0, None)),
    "wrong values": found(RIGHT, ("batch 3", 0.5, None)),
    "does not run": found(("the example", 0.0, "onnxruntime: no such operator"), ("batch 3", 0.0, "the same")),
    "not judged": VerifiedFile(why_not="it takes words"),
}


@pytest.mark.parametrize("verdict", JUDGED)
def test_the_verdict_follows_from_the_cases(verdict):
    assert judged(JUDGED[verdict])[0] == verdict


def test_shapes_and_fixed_sizes_count():
    assert judged(found(RIGHT, ("batch 3", 0.0, "step 0, output 'y': expected shape (3, 2)")))[0] == "wrong values"
    other_head = "step 0, output 'y': expected shape (3, 2)"
    assert judged(found(("the example", 0.0, other_head), ("batch 3", 0.0, other_head)))[0] == "not judged"
    for text in ("axis 0 of input_ids at 1", "axis 1 of input_ids at 2", "axis 2 of pixel_values at 1"):
        assert judged(found(RIGHT, remarks=[f"the file fixes {text}"]))[0] == "right at some sizes only"
    one_token = [f"the file fixes axis 1 of {name} at 1" for name in ("input_ids", "position_ids")]
    assert judged(found(RIGHT, remarks=one_token))[0] == "right"


def test_cells_are_processes_of_their_own_and_what_is_recorded_is_not_run_again(tmp_path):
    options = parse(["--only", "bert", "--output", str(tmp_path / "oracle.json")])
    assert options.apart
    results = Results(options.output, {}, "oracle")
    results.record("bert", {"torch.onnx": {"ok": True, "verdict": "right"}}, "state")
    ((_, left, _),) = work_left(results, ["bert"], ["yobx-flatten", "torch.onnx"], None, "state")
    assert left == ["yobx-flatten"]
    assert verdict_of(results, "bert", "mobius-onnx") == NOT_RUN
    assert "| torch.onnx | 1 |" in small_table(results)


@pytest.mark.slow
def test_two_cells_of_two_exporters_are_as_recorded():
    recorded = Results.read(recorded_file("oracle"))
    runner = Runner("oracle", Limits(seconds=900.0, gigabytes=32.0), run_type, preload=("matrix.preload_oracle",))
    for name in ("llama", "qwen2"):
        for exporter in ("yobx-flatten", "torch.onnx"):
            result = runner.run_type(name, [exporter], {})[exporter]
            assert result["verdict"] == verdict_of(recorded, name, exporter) == "right", result
            assert result["cases"] >= 3
