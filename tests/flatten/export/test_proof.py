"""How much of an export is replayed, and what the report states of it."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
import torch

from yobx_flatten import export_onnx, export_program
from yobx_flatten.errors import InvalidArgumentError, NoRoomError
from yobx_flatten.export.model_facts import ModelFacts, weight_bytes
from yobx_flatten.export.proof import eager_runs
from yobx_flatten.export.proof.eager_runs import Case
from yobx_flatten.export.runtimes import write

pytestmark = pytest.mark.slow


EXAMPLE = (torch.ones(2, 3),)
CASES = [Case("5 rows", (torch.ones(5, 3),)), Case("9 rows", (torch.ones(9, 3),)), Case("4 rows", (torch.ones(4, 3),))]


def replayed(report):
    return [(result.case, result.runtime) for result in report.cases]


PROGRAM, FILE = "torch.export", "onnxruntime"


@pytest.mark.parametrize(
    ("export", "proof", "count", "expected"),
    [
        (export_onnx, "auto", 1, [(name, of) for of in (PROGRAM, FILE) for name in ("the example", "5 rows")]),
        (export_onnx, "standard", 2, [("the example", FILE), ("5 rows", FILE), ("9 rows", FILE)]),
        (export_program, "standard", 2, [("the example", PROGRAM), ("5 rows", PROGRAM), ("9 rows", PROGRAM)]),
        (export_onnx, "sample", 3, [("the example", FILE), ("9 rows", FILE)]),  # the largest case
        (export_program, "sample", 3, [("the example", PROGRAM), ("9 rows", PROGRAM)]),
    ],
)
def test_a_proof_replays_the_cases_of_its_kind(tmp_path, export, proof, count, expected):
    path = {"path": tmp_path / "a.onnx"} if export is export_onnx else {}
    found = export(torch.nn.Linear(3, 2), EXAMPLE, **path, cases=CASES[:count], proof=proof)
    assert replayed(found.report) == expected
    assert found.report.proof == {"auto": "full"}.get(proof, proof)
    assert str(found).splitlines()[-1].strip().startswith("proof: sample; trace ") == (proof == "sample")


def test_a_sample_still_finds_a_wrong_file(tmp_path, monkeypatch):
    module = torch.nn.Linear(3, 2)

    def wrong(converted, *args, **kwargs):
        initializer = converted.graph.initializers["bias"]
        initializer.const_value = type(initializer.const_value)(torch.full((2,), 7.0), name="bias")

    from yobx_flatten.errors import ReplayError
    from yobx_flatten.export.onnx import file as onnx_file

    save = onnx_file.UnprovenFile.save
    monkeypatch.setattr(onnx_file.UnprovenFile, "save", lambda self, model: (wrong(model), save(self, model))[1])
    with pytest.raises(ReplayError):
        export_onnx(module, EXAMPLE, path=tmp_path / "a.onnx", cases=CASES, proof="sample")
    assert not (tmp_path / "a.onnx").exists()


def test_without_a_proof_the_report_says_unproven(tmp_path):
    found = export_onnx(torch.nn.Linear(3, 2), EXAMPLE, path=tmp_path / "a.onnx", cases=CASES, proof="none")
    assert found.report.cases == []
    assert str(found).splitlines()[1].strip().startswith("UNPROVEN")
    assert (tmp_path / "a.onnx").is_file()


def test_the_size_of_the_weights_decides_by_default(monkeypatch):
    """Full below the first limit, files alone below the second, a sample from there."""
    size = ModelFacts.of(torch.nn.Linear(3, 2)).weight_bytes
    assert size == 32
    monkeypatch.setattr(eager_runs, "STANDARD_FROM", 33)
    assert eager_runs.choose_proof("auto", size) == "full"
    monkeypatch.setattr(eager_runs, "STANDARD_FROM", 32)
    assert eager_runs.choose_proof("auto", size) == "standard"
    monkeypatch.setattr(eager_runs, "SAMPLED_FROM", 32)
    assert eager_runs.choose_proof("auto", size) == "sample"
    assert eager_runs.choose_proof("full", size) == "full"


def test_an_unknown_proof_is_refused():
    with pytest.raises(InvalidArgumentError, match="'auto', 'full', 'standard', 'sample', 'none'"):
        export_program(torch.nn.Linear(3, 2), EXAMPLE, proof="some")


def test_the_report_has_time_and_memory_of_every_step(tmp_path):
    report = export_onnx(torch.nn.Linear(3, 2), EXAMPLE, path=tmp_path / "a.onnx", cases=[]).report
    assert list(report.seconds) == ["trace", "replay", "convert", "save", "load"]
    assert all(seconds > 0 for seconds in report.seconds.values())
    assert report.peak_growth.keys() == report.seconds.keys()
    assert all(growth >= 0 for growth in report.peak_growth.values())


def test_tied_weights_are_counted_once():
    """Two modules that share a table of 4 rows and 2 columns of float32 hold 32 bytes."""
    first, second = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False)
    second.weight = first.weight
    assert weight_bytes(torch.nn.Sequential(first, second)) == 32


def test_a_full_disk_is_found_before_anything_is_traced(tmp_path, monkeypatch):
    monkeypatch.setattr(write.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10}))
    module = torch.nn.Linear(3, 2)
    monkeypatch.setattr(module, "forward", lambda *args: pytest.fail("the module was called"))
    with pytest.raises(NoRoomError, match=r"the weights take 32 bytes, and 10 bytes are free"):
        export_onnx(module, EXAMPLE, path=tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_found_before_anything_is_traced(monkeypatch):
    facts = dataclasses.replace(ModelFacts.of(torch.nn.Linear(3, 2)), weight_bytes=2**31)
    monkeypatch.setattr(write, "memory_available", lambda: 2**30)
    monkeypatch.setattr(write.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 2**40}))
    with pytest.raises(NoRoomError, match=r"needs 2\.68 GB .* 1\.07 GB are available(?s:.*)proof=\"none\""):
        write.check_room(facts, pathlib.Path("a.onnx"))
    write.check_room(facts, pathlib.Path("a.onnx"), in_memory=0)


def test_an_opset_that_onnxruntime_lacks_is_found_before_anything_is_traced(tmp_path, monkeypatch):
    """No onnxruntime has version 99."""
    module = torch.nn.Linear(3, 2)
    monkeypatch.setattr(module, "forward", lambda *args: pytest.fail("the module was called"))
    with pytest.raises(InvalidArgumentError, match="opset_version=99: the installed onnx has"):
        export_onnx(module, EXAMPLE, path=tmp_path / "a.onnx", opset_version=99)
