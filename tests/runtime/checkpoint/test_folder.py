"""Tests of roundpipe_runtime.checkpoint.folder: checkpoints appear and leave at once."""

import os

import pytest

from roundpipe_runtime.checkpoint import folder as folder_module
from roundpipe_runtime.checkpoint.folder import appearing, next_path, remove_leftovers, remove_old


def make(folder, count):
    for _ in range(count):
        with appearing(next_path(folder)) as half:
            (half / "data").write_text("x")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_files_are_on_the_disk_before_the_name_is_there(tmp_path, monkeypatch):
    """Data, manifest, their folder; then the name; then the folder around it."""
    done = []
    real_fsync, real_rename = os.fsync, folder_module.pathlib.Path.rename

    def fsync(number):
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{number}")))
        real_fsync(number)

    def rename(path, target):
        done.append(f"{path.name} -> {target.name}")
        return real_rename(path, target)

    if not os.path.exists("/proc/self/fd"):
        pytest.skip("the names of open files are not to be had here")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(folder_module.pathlib.Path, "rename", rename)
    make(tmp_path, 1)
    half = ".checkpoint-00000001.writing"
    assert done == ["data", "checkpoint.json", half, f"{half} -> checkpoint-00000001", tmp_path.name]


def test_a_checkpoint_that_misses_a_file_is_not_counted(tmp_path):
    make(tmp_path, 4)
    (tmp_path / "checkpoint-00000003" / "data").unlink()
    remove_old(tmp_path, 2)
    assert names(tmp_path) == [f"checkpoint-0000000{number}" for number in (2, 3, 4)]


def test_leftovers_go_and_nothing_else(tmp_path):
    make(tmp_path, 1)
    for name in (".checkpoint-00000002.writing", ".checkpoint-00000000.leaving", ".mine", "checkpoint-best", "logs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".mine", "checkpoint-00000001", "checkpoint-best", "logs"]


def test_numbers_sort_as_numbers(tmp_path):
    """Also past eight digits."""
    for number in (99999999, 100000000):
        (tmp_path / f"checkpoint-{number}").mkdir()
    assert next_path(tmp_path).name == "checkpoint-100000001"
