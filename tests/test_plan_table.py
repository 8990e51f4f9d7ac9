"""Tables of the pages: what the plan command plans, what was measured beside onnx-diagnostic, and what was tried."""

import importlib.util
import json
from pathlib import Path

import pytest
import transformers
from packaging.requirements import Requirement

DOCS = Path(__file__).parent.parent / "docs"


def program(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plan_table, tried_table = program("plan_table"), program("tried_table")
STORED = json.loads((DOCS / "data" / "plans.json").read_text(encoding="utf-8"))


def test_the_table_has_every_model_and_training_and_its_numbers_are_those_of_the_machines():
    """Weights of 2 bytes, gradients, masters and two moments of 4: 18 bytes; 10 with 8 bits; adapters leave 2."""
    assert STORED.keys() == plan_table.MODELS.keys()
    assert all(tuple(trainings) == plan_table.TRAININGS for trainings in STORED.values())
    for name, trainings in STORED.items():
        stated = float(name.rpartition(" ")[2].removesuffix("B"))
        assert all(abs(found["parameters"] / 1e9 / stated - 1) < 0.25 for found in trainings.values())
    for trainings in STORED.values():
        for name, each in zip(plan_table.TRAININGS, (18, 10, 2), strict=True):
            found = trainings[name]
            assert each * found["parameters"] < found["host bytes"] < (each + 1.7) * found["parameters"] + 6e9
    for trainings in STORED.values():
        for found in trainings.values():
            machines = [found["machines"][size] for size in plan_table.MACHINES]
            fits = [machine["fits"] for machine in machines]
            assert fits == sorted(fits)
            times = [machine["seconds on 1"] for machine in machines if machine["fits"]]
            assert times == sorted(times, reverse=True)
            assert all(machine["seconds on 4"] < machine["seconds on 1"] for machine in machines)


@pytest.mark.slow  # seconds: a model of 28 layers is measured
def test_two_layers_stand_for_all_of_them():
    import torch

    from roundpipe_runtime.estimate import Hardware
    from roundpipe_runtime.huggingface.plan_training import PlannedTraining, model_on_meta

    name = next(iter(STORED))
    cls, sizes = plan_table.MODELS[name]
    model = model_on_meta(getattr(transformers, cls)(dtype="bfloat16", **sizes))
    card = Hardware(names=("cuda:0",), kind="cuda", host=None, host_rate=1e9, origin={}, **plan_table.MACHINES["24 GB"])
    size = {"batch": plan_table.BATCH, "length": plan_table.LENGTH, "num_microbatch": plan_table.MICROBATCHES}
    report = PlannedTraining(model, card, optim_dtype=torch.float32).report(**size)
    stored = STORED[name][plan_table.TRAININGS[0]]
    found = stored["machines"]["24 GB"]
    assert stored["parameters"] == sum(p.numel() for p in model.parameters())
    assert 0.95 * stored["host bytes"] < report.host_memory.total <= stored["host bytes"]
    assert report.simulation.time == pytest.approx(found["seconds on 1"], rel=1e-3)
    assert max(memory.total for memory in report.device_memory) == pytest.approx(found["device bytes"], rel=1e-3)


FOUND = json.loads((DOCS / "data" / "store-peer.json").read_text(encoding="utf-8"))
GUIDE = (DOCS / "dev" / "store_format.md").read_text(encoding="utf-8")


def test_the_table_of_the_guide_is_the_measured_one():
    rows = GUIDE.partition("| value | onnx-diagnostic | yobx_flatten |\n|---|---|---|\n")[2].splitlines()
    expected = [
        f"| {name} | {row['onnx-diagnostic']} | {row['yobx_flatten']} |" for name, row in FOUND["values"].items()
    ]
    assert rows == expected
    for name in ("onnx-diagnostic", "torch", "transformers"):
        assert f"{name} {FOUND['versions'][name]}" in GUIDE
    assert {row["yobx_flatten"] for row in FOUND["values"].values()} == {"the same"}
    assert sum(row["onnx-diagnostic"].startswith("not ") for row in FOUND["values"].values()) > 10


RECORDED = {
    "date": "2026-11-25",
    "ok": False,
    "versions": {"python": "3.11.7", "torch": "2.15.0+cu130", "transformers": "5.25.0"},
    "steps": [
        {"name": "the programs of the README", "result": "ok", "reason": "", "seconds": 2.0},
        {"name": "roundpipe demo", "result": "failed", "reason": "A | B\n`c`", "seconds": 2.0},
        {"name": "further cases", "result": "not there", "reason": "no folder", "seconds": 0.0},
    ],
    "unknown": {"model types": ["dory"], "caches": []},
}


def test_the_newest_versions_and_their_results_are_shown(tmp_path):
    assert tried_table.in_words(Requirement("torch")) == ""
    shown = list(tried_table.lines(RECORDED))
    held = tried_table.development()
    assert f"| torch |  | {held['torch']} | 2.15.0 | 2.11 and newer |" in shown
    before = ", ".join(tried_table.older())
    assert f"| transformers | {before} | {held['transformers']} | 5.25.0 | 4.56 and newer, below 6 |" in shown
    assert before.startswith("4.56.2, ")
    assert "`make newest` ran with the newest versions on 2026-11-25, and not all steps passed:" in shown
    assert "| the programs of the README | ok |" in shown
    assert r"| roundpipe demo | failed: `A \| B 'c'` |" in shown
    assert "| further cases | not there |" in shown
    assert shown[-1] == "- model types: `dory`"
    assert "all steps passed:" in "\n".join(tried_table.lines({**RECORDED, "ok": True}))
    assert list(tried_table.lines(None))[-1] == "The newest versions are not recorded yet: `make newest` records them."
    tried_table.write_tried(tmp_path)
    assert (tmp_path / "tried.md").read_text(encoding="utf-8").startswith("| | older | development and CI | newest |")
    assert "{include} ../tables/tried.md" in (DOCS / "guide" / "install.md").read_text(encoding="utf-8")
