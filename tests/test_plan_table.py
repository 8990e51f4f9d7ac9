"""The table of memory by model is what the command plans."""

import importlib.util
import json
from pathlib import Path

import pytest
import transformers

DOCS = Path(__file__).parent.parent / "docs"
SPEC = importlib.util.spec_from_file_location("plan_table", DOCS / "plan_table.py")
plan_table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(plan_table)
STORED = json.loads((DOCS / "data" / "plans.json").read_text(encoding="utf-8"))


def test_the_table_has_every_model_and_training():
    assert STORED.keys() == plan_table.MODELS.keys()
    assert all(tuple(trainings) == plan_table.TRAININGS for trainings in STORED.values())
    for name, trainings in STORED.items():
        stated = float(name.rpartition(" ")[2].removesuffix("B"))
        assert all(abs(found["parameters"] / 1e9 / stated - 1) < 0.25 for found in trainings.values())


def test_all_weights_need_eighteen_bytes_each_on_the_host_and_their_activations():
    """Weights of 2 bytes, gradients, masters and two moments of 4: 18 bytes; 10 with 8 bits; adapters leave 2."""
    for trainings in STORED.values():
        for name, each in zip(plan_table.TRAININGS, (18, 10, 2), strict=True):
            found = trainings[name]
            assert each * found["parameters"] < found["host bytes"] < (each + 1.7) * found["parameters"] + 6e9


def test_a_faster_machine_takes_less_time_and_a_larger_one_holds_what_a_smaller_one_does():
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
