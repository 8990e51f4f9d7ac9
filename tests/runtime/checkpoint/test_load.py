"""Tests of roundpipe_runtime.checkpoint.save_and_load: the newest that is whole, and nothing by half."""

import hashlib
import json
import random
import warnings

import numpy
import pytest
import torch
from torch import nn

from roundpipe_runtime import (
    CheckpointError,
    CheckpointWarning,
    DamagedCheckpointError,
    GradScaler,
    load_checkpoint,
    save_checkpoint,
)
from tests.runtime.small import same_bits, small_model


def filled(value):
    model = small_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def value_of(model):
    return {element for parameter in model.parameters() for element in parameter.flatten().tolist()}


def three(folder):
    return [save_checkpoint(folder, filled(float(n)), data={"step": n}).path for n in (1, 2, 3)]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_there_is_none_yet(tmp_path):
    model = filled(7.0)
    assert load_checkpoint(tmp_path / "nowhere", model) is None
    assert load_checkpoint(tmp_path, model) is None
    assert value_of(model) == {7.0}


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "training.json", "checkpoint.json"])
def test_a_damaged_one_is_passed_over(tmp_path, name):
    flip(three(tmp_path)[2] / name)
    model = small_model()
    with pytest.warns(CheckpointWarning, match=r"A checkpoint is damaged, .*checkpoint-00000003"):
        assert load_checkpoint(tmp_path, model) == {"step": 2}
    assert value_of(model) == {2.0}


def test_two_damaged_ones_are_passed_over(tmp_path):
    paths = three(tmp_path)
    (paths[2] / "model.safetensors").unlink()
    (paths[1] / "checkpoint.json").unlink()
    model = small_model()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert load_checkpoint(tmp_path, model) == {"step": 1}
    assert [warning.category for warning in seen] == [CheckpointWarning] * 2
    assert {warning.filename for warning in seen} == {__file__}


@pytest.mark.filterwarnings("ignore::roundpipe_runtime.CheckpointWarning")
def test_if_all_are_damaged_nothing_starts_anew_in_silence(tmp_path):
    """`None` would overwrite days of work; the error names each."""
    for path in three(tmp_path):
        flip(path / "training.json")
    model = filled(7.0)
    with pytest.raises(DamagedCheckpointError, match=r"(?s)All .*00000003.*00000002.*00000001"):
        load_checkpoint(tmp_path, model)
    assert value_of(model) == {7.0}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: flip(path / "model.safetensors"), r"model\.safetensors was changed after it was written"),
        (lambda path: (path / "checkpoint.json").unlink(), r"checkpoint\.json is missing"),  # it is still one
    ],
)
def test_a_damaged_one_by_name_is_an_error(tmp_path, damage, message):
    """Who names one wants that one; `None` would say that there is none yet."""
    paths = three(tmp_path)
    damage(paths[2])
    with pytest.raises(DamagedCheckpointError, match=message):
        load_checkpoint(paths[2], small_model())


def test_the_newest_is_loaded_or_one_by_its_name_which_may_change(tmp_path):
    best = three(tmp_path)[1].rename(tmp_path / "best")
    model = small_model()
    assert load_checkpoint(best, model) == {"step": 2}
    assert value_of(model) == {2.0}
    assert load_checkpoint(tmp_path, model) == {"step": 3}
    assert value_of(model) == {3.0}


def test_what_a_killed_run_left_behind_is_no_checkpoint_and_goes_and_nothing_else_does(tmp_path):
    three(tmp_path)
    others = [".mine", "checkpoint-best", "logs"]
    for name in (".checkpoint-00000004.writing", ".checkpoint-00000000.leaving", *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    model = small_model()
    assert load_checkpoint(tmp_path, model) == {"step": 3}
    save_checkpoint(tmp_path, model, keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-00000004", *others}


def test_what_is_loaded_outlives_its_files(tmp_path):
    model, data = small_model(), {"mask": torch.ones(100)}
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    path = save_checkpoint(tmp_path, model, optimizer=optimizer, data=data).path
    again = small_model(seed=1)
    other = torch.optim.Adam(again.parameters())
    found = load_checkpoint(tmp_path, again, optimizer=other)
    for file in path.glob("*.safetensors"):
        with open(file, "r+b") as opened:
            opened.write(bytes(file.stat().st_size))
    assert found["mask"].sum() == 100
    assert same_bits(list(again.parameters()), list(model.parameters()))
    assert torch.equal(other.state[again[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


SCHEDULERS = {
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 20),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "steps": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),
    "cyclic": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "sequence": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        [3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_where_they_were(tmp_path, name):
    def make():
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return model, optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer, scheduler, steps):
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    _, optimizer, scheduler = make()
    expected = rates(optimizer, scheduler, 8)
    model, optimizer, scheduler = make()
    rates(optimizer, scheduler, 3)
    save_checkpoint(tmp_path, model, optimizer=optimizer, scheduler=scheduler)
    again, optimizer, scheduler = make()
    load_checkpoint(tmp_path, again, optimizer=optimizer, scheduler=scheduler)
    assert rates(optimizer, scheduler, 5) == expected[3:]


def test_a_plateau_remembers_its_best_and_a_scaler_its_scale_and_how_long_it_was_good(tmp_path):
    """A plateau starts with infinity, which JSON has no word for; the next growth comes when it would have come."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    scaler = GradScaler(init_scale=8.0, growth_interval=3)
    save_checkpoint(tmp_path, model, scheduler=plateau)
    plateau.step(2.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0, "_growth_tracker": 2})
    save_checkpoint(tmp_path, model, scheduler=plateau, scaler=scaler)
    again, other = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1), GradScaler()
    load_checkpoint(tmp_path, model, scheduler=again, scaler=other)
    assert again.best == 2.0
    assert other.state_dict() == scaler.state_dict()
    assert other.get_scale() == 32.0


def test_several_optimizers_and_schedulers(tmp_path):
    def make():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in model]
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
        return model, optimizers, schedulers

    model, optimizers, schedulers = make()
    optimizers[1].step()
    schedulers[1].step()
    save_checkpoint(tmp_path, model, optimizer=optimizers, scheduler=schedulers)
    again, others, their_schedulers = make()
    load_checkpoint(tmp_path, again, optimizer=others, scheduler=their_schedulers)
    assert [optimizer.param_groups[0]["lr"] for optimizer in others] == [0.1, 0.05]
    with pytest.raises(CheckpointError, match="optimizer= has 1 entries, but 2 were saved"):
        load_checkpoint(tmp_path, again, optimizer=others[0], scheduler=their_schedulers)


def test_what_was_saved_and_not_asked_for_is_a_warning(tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    save_checkpoint(tmp_path, model, optimizer=optimizer, scheduler=scheduler)
    with pytest.warns(CheckpointWarning, match="also contains scheduler, which is not loaded"):
        load_checkpoint(tmp_path, model, optimizer=optimizer)
    load_checkpoint(tmp_path, model)


def test_generators_go_on_where_they_were(tmp_path):
    def draw():
        return torch.randn(3).tolist(), random.random(), random.gauss(0, 1), numpy.random.standard_normal(3).tolist()

    draw()
    save_checkpoint(tmp_path, small_model())
    seed, expected, model = torch.initial_seed(), draw(), small_model()
    torch.manual_seed(seed + 1)
    load_checkpoint(tmp_path, model)
    assert torch.initial_seed() == seed
    assert draw() == expected


def changed_by_its_author(path, name, content):
    """A file of a checkpoint is another one, and the manifest says so."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "checkpoint.json").write_text(json.dumps(manifest), encoding="utf-8")


@pytest.mark.parametrize(
    "change",
    [
        {"random": {"python": [3, [1, 2, 3], None]}},
        {"random": []},
        {"data": 5},
        {"data": {"$dtype": "load"}},
        {"data": {"a": {"$tensor": "nothing"}}},
        {"data": {"a": {"$unknown": 1}}},
        {"optimizers": 5},
        {"optimizers": [{}]},
        {"model": None},
        {"progress": {"pipelines": {}, "masters": {}, "gradients": {"0.weight": 5}, "buffers": {}}},
        {"progress": {"pipelines": {"": {"runs": "x"}}, "masters": {}, "gradients": {}, "buffers": {}}},
        {"progress": {"pipelines": {"": {"runs": 1, "replicas": []}}, "masters": {}, "gradients": {}, "buffers": {}}},
    ],
    ids=str,
)
def test_what_its_author_changed_is_one_error_and_changes_nothing(tmp_path, change):
    model = filled(1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    path = save_checkpoint(tmp_path, model, optimizer=optimizer).path
    training = json.loads((path / "training.json").read_text(encoding="utf-8"))
    merged = {key: {**training[key], **value} if key == "random" and value else value for key, value in change.items()}
    changed_by_its_author(path, "training.json", json.dumps({**training, **merged}).encode())
    other = filled(7.0)
    optimizer = torch.optim.Adam(other.parameters(), lr=0.5)
    states = random.getstate(), torch.get_rng_state()
    with pytest.raises((CheckpointError, DamagedCheckpointError)):
        load_checkpoint(path, other, optimizer=optimizer)
    assert value_of(other) == {7.0}
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{}"], ids=str)
def test_tensors_that_are_none_are_one_error(tmp_path, name, content):
    model = filled(1.0)
    path = save_checkpoint(
        tmp_path, model, optimizer=torch.optim.Adam(model.parameters()), data={"x": torch.ones(2)}
    ).path
    changed_by_its_author(path, name, content)
    other = filled(7.0)
    with pytest.raises(DamagedCheckpointError, match=r"is damaged|is not a safetensors file"):
        load_checkpoint(path, other)
    assert value_of(other) == {7.0}
