"""Each writer over its own old files, killed at moments that are spread over all that it does to files."""

import os
import shutil

import pytest

from tests import fresh_process
from yobx_flatten.core.files.scratch import settle

pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")
pytest.importorskip("accelerate")
if os.name != "posix":
    pytest.skip("a process is killed in a fork", allow_module_level=True)

from tests.killed.writers import WRITERS, value_of

pytestmark = pytest.mark.slow

# `make kills` asks for thirty.
KILLS = int(os.environ.get("ROUNDPIPE_KILLS", "2"))
OLD, NEW = 4, 9


def write(name, folder, value, *event):
    return fresh_process.run(
        *("-m", "tests.killed.writers", name, folder, str(value), *map(str, event)),
        check=False,
        imported=fresh_process.TRAINER,
    )


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if ".lock" not in path.name)


@pytest.mark.timeout(300 * max(1, KILLS // 2))  # of `make test` for two kills
@pytest.mark.parametrize("name", WRITERS)
def test_a_kill_leaves_the_old_or_the_new_files(tmp_path, name):
    old, whole, folder = tmp_path / "old", tmp_path / "whole", tmp_path / "folder"
    old.mkdir()
    assert write(name, old, OLD).returncode == 0
    shutil.copytree(old, whole)
    done = write(name, whole, NEW)
    assert done.returncode == 0, done.stderr
    assert value_of(name, whole) == NEW
    events = int(done.stdout.split()[-1])
    assert events > 2
    found = set()
    for number in range(KILLS):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(old, folder)
        at = events - round(number * (events - 1) / max(1, KILLS - 1))  # the last and the first are among them
        killed = write(name, folder, NEW, at)
        assert killed.returncode == 9, killed.stderr
        settle(folder / "model")  # as readers of an exported folder do: a folder cannot be replaced in one step
        found.add(value_of(name, folder))
        again = write(name, folder, NEW)
        assert again.returncode == 0, again.stderr
        assert value_of(name, folder) == NEW
        assert len(names(folder)) == len(names(whole)), set(names(folder)) ^ set(names(whole))
    assert found <= {OLD, NEW}
