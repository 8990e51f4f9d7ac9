"""The table of memory by model is what the command plans."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

DOCS = Path(__file__).parent.parent / "docs"
SPEC = importlib.util.spec_from_file_location("plan_table", DOCS / "plan_table.py")
plan_table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(plan_table)
STORED = json.loads((DOCS / "data" / "plans.json").read_text(encoding="utf-8"))


def test_the_table_has_every_model_and_training():
    """And counts the parameters that the names of the models state."""
    assert STORED.keys() == plan_table.MODELS.keys()
    assert all(tuple(trainings) == plan_table.TRAININGS for trainings in STORED.values())
    for name, trainings in STORED.items():
        stated = float(name.rpartition(" ")[2].removesuffix("B"))
        assert all(abs(found["parameters"] / 1e9 / stated - 1) < 0.25 for found in trainings.values())


def test_all_weights_need_sixteen_bytes_each_on_the_host_and_their_activations():
    """Weights of 2 bytes, gradients, master weights and two moments of 4: 18 bytes; adapters leave the 2."""
    for trainings in STORED.values():
        whole, adapters = (trainings[name] for name in plan_table.TRAININGS)
        assert 18 * whole["parameters"] < whole["host bytes"] < 19.7 * whole["parameters"] + 6e9
        assert 2 * whole["parameters"] < adapters["host bytes"] < 3.2 * whole["parameters"] + 6e9


@pytest.mark.slow
def test_a_plan_of_today_is_the_stored_one():
    """Of the smallest model, on a machine that is described and not there."""
    name, training = next(iter(STORED)), plan_table.TRAININGS[0]
    assert plan_table.plan(name, training) == pytest.approx(STORED[name][training], rel=0.01)
