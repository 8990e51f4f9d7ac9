"""The page of runtimes shows what was recorded; programs are replayed in every size, and inputs moved in memory."""

import io
import json
from pathlib import Path

import pytest
import torch

from matrix.cases import DifferenceError
from matrix.places import strided
from matrix.results import Results, recorded_file
from matrix.runtimes import causal_types, parse
from matrix.runtimes_cases import COLUMNS as OF_FOLDERS
from matrix.runtimes_cases import TYPES
from matrix.runtimes_causes import cause_of
from matrix.runtimes_programs import COLUMNS, NEEDS, ProgramTrial, _refused
from matrix.worker import run_columns
from yobx_flatten.export.exported_model import source_of


def test_types_of_folders_are_recorded_known_causes_stated_and_columns_those_of_installed_libraries(monkeypatch):
    types = Results.read(recorded_file("runtimes")).types
    assert {name for name, entry in types.items() if set(entry["columns"]) & set(OF_FOLDERS)} == set(TYPES)
    known = {("OpenVINO", "no rule for f", ("llama",)): "it has no f", ("Execu", "0x1", ()): "always"}
    monkeypatch.setattr("matrix.runtimes_causes.RUNTIME_CAUSES", known)
    assert cause_of("llama", "OpenVINO", "RuntimeError: no rule for f (x)") == "it has no f"
    assert cause_of("gpt2", "OpenVINO", "RuntimeError: no rule for f") == "`RuntimeError: no rule for f`"
    assert cause_of("gpt2", "ExecuTorch", "RuntimeError: 0x1") == "always"
    assert cause_of("llama", "AOTInductor", "RuntimeError: no rule for f") == "`RuntimeError: no rule for f`"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "executorch" else name)
    assert parse([]).columns == ["program", "OpenVINO", "AOTInductor"]
    assert parse(["--columns", "AOTInductor"]).columns == ["program", "AOTInductor"]
    assert parse(["--folders", "--columns", "ExecuTorch folder"]).columns == ["ExecuTorch folder"]
    monkeypatch.setattr("matrix.runtimes.type_names", lambda: ["llama", "qwen2", "mistral", "mamba", "seq2seq:t5"])
    assert causal_types() == ["llama", "mistral", "mamba", "qwen2"]  # all kinds of cache layers first


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    return ProgramTrial("gemma2", tmp_path_factory.mktemp("gemma2"))


def test_a_program_is_replayed_in_every_size(trial):
    given = {"x": torch.arange(12.0).reshape(3, 4)}
    moved = list(strided(given))  # inputs moved in memory have the same values
    assert [torch.equal(one["x"], given["x"]) for one in moved] == [True, True]
    assert [one["x"].is_contiguous() for one in moved] == [False, False]
    events = io.StringIO()
    run_columns(trial, ["program"], {}, events, (COLUMNS, NEEDS))
    result = json.loads(events.getvalue().splitlines()[-1])["result"]
    assert (result["ok"], result["cases"]) == (True, 6)
    assert [case.name for case in trial.cases] == [
        "batch 3, past 6, new 3",
        "batch 1, past 9, new 2",
        "batch 4, past 7, new 1",
        "batch 2, past 20, new 3",
        "batch 3, past 6, new 3, 3 padded",
    ]


class ReadsInOrder:
    """A file that takes what a cache holds in the order of memory, whatever the strides are."""

    def __init__(self, runner):
        self.ports, self._runner = runner.ports, runner

    def run(self, inputs):
        lying = {
            name: given.as_strided(given.shape, torch.empty(given.shape, device="meta").stride())
            for name, given in inputs.items()
            if given.is_floating_point()
        }
        return self._runner.run({**inputs, **lying})


class IgnoresTheMask:
    """A file that takes any mask, and sees all tokens."""

    def __init__(self, runner):
        self.ports, self._runner = runner.ports, runner

    def run(self, inputs):
        rows, columns = inputs["input_ids"].shape[0], inputs["attention_mask"].shape[1]
        return self._runner.run({**inputs, "attention_mask": torch.ones(rows, columns, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (ReadsInOrder, "the example, other strides: logits differ"),
        (IgnoresTheMask, "3 padded, other strides: logits differ"),
    ],
)
def test_a_file_that_is_wrong_about_one_input_does_not_pass(wrong, said, trial, monkeypatch):
    file = wrong(trial.free._runner)
    monkeypatch.setattr("yobx_flatten.runners.open.open_runner", lambda *args, **options: file)
    with pytest.raises(DifferenceError, match=said):
        trial.calls(trial.free, Path("unused"), "openvino")


def test_a_file_that_takes_what_the_model_refuses_does_not_pass(trial):
    """A mask without the last row; torch's own program refuses it, as the model does."""
    source = source_of(trial.free)
    with trial.way.block(trial.model):
        assert _refused(trial.free._runner, source, source.cases[1]) > 0
        with pytest.raises(DifferenceError, match=r"attention_mask of shape \(2, 9\) after \(3, 9\): numbers"):
            _refused(IgnoresTheMask(trial.free._runner), source, source.cases[1])
