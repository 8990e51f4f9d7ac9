"""Tests of save_checkpoint: in the caller's thread and beside it, and when the disk says no."""

import errno
import os
import pathlib
import sys
import threading
from unittest import mock

import pytest
import torch

from roundpipe_runtime import CheckpointError, ConfigError, list_checkpoints, load_checkpoint, save_checkpoint
from roundpipe_runtime.checkpoint import training_state
from tests import fresh_process
from tests.runtime.small import same_bits, small_model


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def fill(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


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


def test_a_save_changes_nothing(tmp_path):
    model = small_model()
    before, state = weights(model), torch.get_rng_state()
    save_checkpoint(tmp_path, model)
    assert same_bits(weights(model), before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"keep": keep}, "keep must be a number of at least 1, or None for all") for keep in (0, -1, True, "2")),
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
