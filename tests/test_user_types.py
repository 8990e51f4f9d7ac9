"""The script of a user whose types `make types` checks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fresh_process

SCRIPT = Path(__file__).with_name("user_types.py")


def test_it_runs():
    pytest.importorskip("onnx")
    fresh_process.run("-m", "tests.user_types")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif("TASKS_SITE" not in os.environ, reason="make tasks")
def test_the_installed_package_states_its_types(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    # all of torch is read the first time, minutes on a busy machine; what is learned of it is kept
    cache = Path(__file__).parents[1] / "build" / "mypy_of_tasks"
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
