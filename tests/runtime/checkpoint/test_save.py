"""Saving, also next to the training or on a full disk; and loading: the newest that is whole, nothing by half."""

import errno
import hashlib
import json
import os
import pathlib
import random
import sys
import threading
import warnings
from unittest import mock

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from roundpipe_runtime import GradScaler, list_checkpoints, load_checkpoint, save_checkpoint
from roundpipe_runtime.checkpoint import training_state
from roundpipe_runtime.errors import CheckpointError, CheckpointWarning, ConfigError, DamagedCheckpointError
from tests import fresh_process
from tests.runtime.small import names, same_bits, small_model


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def fill(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


@pytest.mark.parametrize("is_async", [False, True])
def test_it_returns_where_it_was_written(tmp_path, is_async):
    saved = save_checkpoint(tmp_path / "deep" / "down", small_model(), is_async=is_async).wait()
    assert saved.done
    assert saved.path == tmp_path / "deep" / "down" / "checkpoint-00000001"
    assert os.fspath(saved) == str(saved) == str(saved.path)
    assert repr(saved) == f"Checkpoint({str(saved.path)!r})"
    assert {"model.safetensors", "training.safetensors", "training.json", "checkpoint.json"} == set(names(saved.path))


@pytest.mark.parametrize("is_async", [False, True])
def test_only_the_last_ones_are_kept_or_all_and_a_folder_without_checkpoints_has_none(tmp_path, is_async):
    assert list_checkpoints(tmp_path) == list_checkpoints(tmp_path / "nowhere") == []
    for step in range(5):
        save_checkpoint(tmp_path / "two", small_model(), data={"step": step}, keep=2, is_async=is_async)
        save_checkpoint(tmp_path / "all", small_model(), keep=None, is_async=is_async)
    for folder in ("two", "all"):
        load_checkpoint(tmp_path / folder, small_model())  # waits
    assert [saved.data for saved in list_checkpoints(tmp_path / "two")] == [{"step": 3}, {"step": 4}]
    assert len(list_checkpoints(tmp_path / "all")) == 5


@pytest.mark.parametrize("inner", ["", "run", "run/deeper"])
def test_a_file_is_not_a_folder(tmp_path, inner):
    file = tmp_path / "run.pt"
    file.write_text("weights")
    with pytest.raises(CheckpointError, match=r"run.pt is a file. Checkpoints need a folder:\n    save_check") as error:
        save_checkpoint(file / inner, small_model())
    assert file.read_text() == "weights"
    (line,) = [line for line in str(error.value).splitlines() if "save_checkpoint(" in line]
    saved = eval(line.strip(), {"save_checkpoint": save_checkpoint, "model": small_model()})
    assert list_checkpoints(tmp_path / "run-checkpoints")[0].path == saved.path


class Gate:
    """Holds the writing back until it is opened."""

    def __init__(self, monkeypatch):
        self.open, self.reached = threading.Event(), threading.Event()
        real = training_state.TrainingState.write

        def write(this, *arguments):
            self.reached.set()
            assert self.open.wait(60)
            real(this, *arguments)

        monkeypatch.setattr(training_state.TrainingState, "write", write)


def test_training_goes_on_while_it_is_written(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fill(model, 1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    saved = save_checkpoint(tmp_path, model, optimizer=optimizer, is_async=True)
    assert gate.reached.wait(60)
    assert not saved.done
    assert repr(saved).endswith("being written)")
    optimizer.step()
    fill(model, 2.0)
    assert list_checkpoints(tmp_path) == []
    gate.open.set()
    saved.wait()
    load_checkpoint(tmp_path, model, optimizer=optimizer)
    assert all((parameter == 1.0).all() for parameter in model.parameters())
    assert not optimizer.state[model[0].weight]


def test_the_next_call_waits_for_the_one_before(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    save_checkpoint(tmp_path, small_model(), data={"n": 1}, is_async=True)
    threading.Timer(0.2, gate.open.set).start()
    save_checkpoint(tmp_path, small_model(), data={"n": 2})
    assert [saved.data["n"] for saved in list_checkpoints(tmp_path)] == [1, 2]


PLACES = {
    "tensors": ("safetensors.torch", "save_file"), "flush": (os, "fsync"), "rename": (pathlib.Path, "rename"),
    "text": (pathlib.Path, "write_text"), "folder": (pathlib.Path, "mkdir"),
}  # fmt: skip


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch, place, is_async):
    model = small_model()
    fill(model, 1.0)
    save_checkpoint(tmp_path, model, data={"step": 1}, keep=1)
    fill(model, 2.0)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    owner, name = PLACES[place]
    owner = sys.modules[owner] if isinstance(owner, str) else owner
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, mock.Mock(side_effect=full))
        with pytest.raises(OSError, match="No space left") as caught:
            save_checkpoint(tmp_path, model, data={"step": 2}, keep=1, is_async=is_async).wait()
        assert any("Earlier checkpoints are unchanged" in note for note in caught.value.__notes__)
    assert names(tmp_path) == ["checkpoint-00000001"]
    assert load_checkpoint(tmp_path, model) == {"step": 1}
    assert all((parameter == 1.0).all() for parameter in model.parameters())
    assert save_checkpoint(tmp_path, model).path.name == "checkpoint-00000002"


def test_a_file_system_that_is_really_full(tmp_path):
    """A limit on the size of files stands for it: the kernel cuts the write short."""
    resource = pytest.importorskip("resource", reason="this system has no limits on the size of files")
    program = f"""
import errno, resource, signal, torch
from roundpipe_runtime import list_checkpoints, load_checkpoint, save_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model = torch.nn.Linear(200, 200)
save_checkpoint({str(tmp_path)!r}, model, keep=1)
expected = model.weight.detach().clone()
torch.nn.init.zeros_(model.weight)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    save_checkpoint({str(tmp_path)!r}, model, keep=1)
except OSError as error:
    print(error.errno == errno.EFBIG)
load_checkpoint({str(tmp_path)!r}, model)
print(torch.equal(model.weight, expected))
"""
    assert resource.RLIMIT_FSIZE is not None
    assert fresh_process.run("-c", program).stdout.split() == ["True", "True"]
    assert names(tmp_path) == ["checkpoint-00000001"]


def test_an_error_in_the_background_comes_out_of_the_next_call_once(tmp_path, monkeypatch, caplog):
    """Not again where `wait` has raised it, and not of a call with another folder."""
    with monkeypatch.context() as patch:
        patch.setattr(training_state.TrainingState, "write", lambda *args: 1 / 0)
        save_checkpoint(tmp_path / "next", small_model(), is_async=True)
        with pytest.raises(ZeroDivisionError):
            save_checkpoint(tmp_path / "next", small_model())
        waited, other = (save_checkpoint(tmp_path / name, small_model(), is_async=True) for name in ("waited", "other"))
        with pytest.raises(ZeroDivisionError):
            waited.wait()
        with pytest.raises(ZeroDivisionError):
            other._writing.result()
    assert "checkpoint-00000001 was not written" in caplog.text
    for name in ("next", "waited"):
        save_checkpoint(tmp_path / name, small_model())
        assert names(tmp_path / name) == ["checkpoint-00000001"]
    with pytest.raises(ZeroDivisionError):
        load_checkpoint(tmp_path / "other", small_model())


def test_the_end_of_the_program_waits(tmp_path):
    program = f"""
import torch
from roundpipe_runtime import save_checkpoint
save_checkpoint({str(tmp_path)!r}, torch.nn.Linear(500, 500), is_async=True)
"""
    fresh_process.run("-c", program)
    assert load_checkpoint(tmp_path, torch.nn.Linear(500, 500)) == {}


def test_four_threads_save_at_once(tmp_path):
    with torch.no_grad():
        threads = [
            threading.Thread(target=save_checkpoint, args=(tmp_path, small_model()), kwargs={"is_async": bool(n % 2)})
            for n in range(4)
        ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    load_checkpoint(tmp_path, small_model())
    assert names(tmp_path) == [f"checkpoint-0000000{number}" for number in (2, 3, 4)]


def test_files_may_be_read_by_others(tmp_path):
    """safetensors makes them private; they have the rights that every new file gets."""
    (tmp_path / "plain").write_text("x")
    saved = save_checkpoint(tmp_path / "runs", small_model())
    assert {path.stat().st_mode for path in saved.path.iterdir()} == {(tmp_path / "plain").stat().st_mode}


def test_tensors_that_share_memory_are_stored_apart(tmp_path):
    whole = torch.arange(6.0)
    data = {"front": whole[:4], "back": whole[2:], "turned": whole.view(2, 3).T, "conj": torch.tensor([1j]).conj()}
    found = save_checkpoint(tmp_path, small_model(), data=data).data
    assert all(torch.equal(found[name], tensor) for name, tensor in data.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"keep": keep}, "keep must be a whole number of at least 1, or None") for keep in (0, -1, True, "2")),
        ({"data": 3}, "data must be a dictionary, found int"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_written(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        save_checkpoint(tmp_path, small_model(), **options)
    assert names(tmp_path) == []


def test_a_folder_that_another_process_writes_to_is_refused(tmp_path):
    from roundpipe_runtime.checkpoint.folder import appearing, next_path, only_writer

    model = small_model()
    with only_writer(tmp_path):
        path = next_path(tmp_path)
        with appearing(path) as half:
            for is_async in (False, True):
                with pytest.raises(CheckpointError, match=r"Another process is writing a checkpoint into .*its own"):
                    save_checkpoint(tmp_path, model, is_async=is_async)
            (half / "data").write_text("x")
    assert (path / "data").is_file()
    saved = [save_checkpoint(tmp_path, model, is_async=is_async).wait().path.name for is_async in (False, True)]
    assert saved == ["checkpoint-00000002", "checkpoint-00000003"]
    assert not (tmp_path / ".writing").exists()


def value_of(model):
    return {element for parameter in model.parameters() for element in parameter.flatten().tolist()}


def three(folder):
    return [save_checkpoint(folder, fill(small_model(), float(n)), data={"step": n}).path for n in (1, 2, 3)]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_there_is_none_yet(tmp_path):
    model = fill(small_model(), 7.0)
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
    model = fill(small_model(), 7.0)
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
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 20),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "sequence": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one, 0.1, total_iters=3), lr_scheduler.ExponentialLR(one, 0.9)], [3]
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
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    scaler = GradScaler(init_scale=8.0, growth_interval=3)
    save_checkpoint(tmp_path, model, scheduler=plateau)
    plateau.step(2.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0, "_growth_tracker": 2})
    save_checkpoint(tmp_path, model, scheduler=plateau, scaler=scaler)
    again, other = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1), GradScaler()
    load_checkpoint(tmp_path, model, scheduler=again, scaler=other)
    assert again.best == 2.0
    assert other.state_dict() == scaler.state_dict()
    assert other.get_scale() == 32.0


def test_several_optimizers_and_schedulers(tmp_path):
    def make():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in model]
        return model, optimizers, [lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]

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
    scheduler = lr_scheduler.StepLR(optimizer, 1)
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


CHANGES = [
    {"random": {"python": [3, [1, 2, 3], None]}}, {"random": []}, {"data": 5}, {"data": {"$dtype": "load"}},
    {"data": {"a": {"$tensor": "nothing"}}}, {"data": {"a": {"$unknown": 1}}}, {"optimizers": 5}, {"optimizers": [{}]},
    {"model": None}, {"progress": {"pipelines": {}, "masters": {}, "gradients": {"0.weight": 5}, "buffers": {}}},
    {"progress": {"pipelines": {"": {"runs": "x"}}, "masters": {}, "gradients": {}, "buffers": {}}},
    {"progress": {"pipelines": {"": {"runs": 1, "replicas": []}}, "masters": {}, "gradients": {}, "buffers": {}}},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_its_author_changed_is_one_error_and_changes_nothing(tmp_path, change):
    model = fill(small_model(), 1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    path = save_checkpoint(tmp_path, model, optimizer=optimizer).path
    training = json.loads((path / "training.json").read_text(encoding="utf-8"))
    merged = {key: {**training[key], **value} if key == "random" and value else value for key, value in change.items()}
    changed_by_its_author(path, "training.json", json.dumps({**training, **merged}).encode())
    other = fill(small_model(), 7.0)
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
    model = fill(small_model(), 1.0)
    path = save_checkpoint(
        tmp_path, model, optimizer=torch.optim.Adam(model.parameters()), data={"x": torch.ones(2)}
    ).path
    changed_by_its_author(path, name, content)
    other = fill(small_model(), 7.0)
    with pytest.raises(DamagedCheckpointError, match=r"is damaged|is not a safetensors file"):
        load_checkpoint(path, other)
    assert value_of(other) == {7.0}
