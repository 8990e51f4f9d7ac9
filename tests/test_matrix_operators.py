"""The search over operators: a file that is wrong is found, and the page shows what is recorded."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from matrix import operators as search
from matrix.operators_cases import Operator, Values, operators
from matrix.results import Results, recorded_file

pytestmark = pytest.mark.slow

# a few of every kind, and those that torch's exporter gets wrong or does not know
SAMPLE = ("atan2", "logsigmoid", "cummax", "bce with logits, weights", "cdist 2", "attention, bool mask", "chunk")


def _named(name):
    return next(one for one in operators() if one.name == name)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # of torch's own TransformerEncoder
def test_each_operator_has_a_name_of_its_own_and_runs():
    every = operators()
    assert len({one.name for one in every}) == len(every) >= 134
    assert Results.read(recorded_file("operators")).types.keys() == {one.name for one in every}
    for one in every:
        one.module()(*one.example)
        assert all(len(values.inputs) == len(one.example) for values in one.others), one.name
    assert sum(bool(one.others) for one in every) > 0.9 * len(every)


@pytest.mark.parametrize("name", SAMPLE)
def test_operators_that_were_repaired_are_right(name):
    found = search.measured(_named(name))
    assert (found["verdict"], found["why"]) == ("right", "")


def test_a_file_that_is_wrong_is_found():
    """NaN has no sign in PyTorch, and one in the file: a value that no export tries."""
    found = search.measured(_named("sign"))
    assert (found["ok"], found["verdict"]) == (False, "wrong")
    assert found["why"].startswith("NaN: 0 eager, nan in the file")


def test_values_that_eager_refuses_are_left_out():
    table = torch.rand(3, 2)
    outside = Values("outside", (table, torch.tensor([7])))
    one = Operator("index_select", "of indices", lambda x, i: x.index_select(0, i), (table, torch.tensor([1, 2])), ())
    assert search.measured(dataclasses.replace(one, others=(outside,)))["verdict"] == "right"


def test_what_is_recorded_is_not_run_again(tmp_path, monkeypatch):
    path, ran = tmp_path / "operators.json", []
    measured = {"ok": True, "verdict": "right", "why": "", "seconds": 0.1}
    monkeypatch.setattr(search, "measured", lambda one: ran.append(one.name) or measured)
    for _ in range(2):
        assert search.main(["--only", "atan", "--output", str(path)]) == 0
    assert ran == [one.name for one in operators() if "atan" in one.name]
    assert search.main(["--only", "atan", "--output", str(path), "--page", str(tmp_path / "page.md")]) == 0
    assert f"| right | {len(ran)} |" in (tmp_path / "page.md").read_text()
