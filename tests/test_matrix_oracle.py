"""The table of exporters: the page shows what was recorded, verdicts follow from cases, a sample still holds."""

from pathlib import Path

import pytest

from matrix.command import work_left
from matrix.oracle import parse
from matrix.oracle_cases import RANKS, TYPES, judged, run_type
from matrix.oracle_exporters import EXPORTERS
from matrix.oracle_page import NOT_RUN, small_table, verdict_of
from matrix.results import Results
from matrix.runner import Limits, Runner
from yobx_flatten.export.proof.replay import CaseResult
from yobx_flatten.export.proof.report import ExportReport
from yobx_flatten.verify import VerifiedFile

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture
def recorded():
    (path,) = (DOCS / "data").glob("oracle-*.json")
    return Results.read(path), path.name


def test_no_cell_of_ours_is_worse_and_a_file_is_called_wrong_only_next_to_two_computations(recorded):
    """Both are ten times further from the file than from each other, or the file returns other shapes."""
    assert (DOCS / "tables" / "oracle.md").read_text(encoding="utf-8") == small_table(recorded[0]) + "\n"
    results, _ = recorded
    assert set(results.types) <= set(TYPES)
    ranks = [*RANKS, NOT_RUN]
    verdicts = {name: [verdict_of(results, name, one) for one in EXPORTERS] for name in results.types}
    own = {name: verdict_of(results, name, "yobx-flatten") for name in results.types}
    behind = {name for name in own if own[name] != min(verdicts[name], key=ranks.index)}
    assert behind == set()
    results, _ = recorded
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
def test_two_cells_of_two_exporters_are_as_recorded(recorded):
    runner = Runner("oracle", Limits(seconds=900.0, gigabytes=32.0), run_type, preload=("matrix.preload_oracle",))
    for name in ("llama", "qwen2"):
        for exporter in ("yobx-flatten", "torch.onnx"):
            result = runner.run_type(name, [exporter], {})[exporter]
            assert result["verdict"] == verdict_of(recorded[0], name, exporter) == "right", result
            assert result["cases"] >= 3
