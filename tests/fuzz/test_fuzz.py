"""A few cases of every door, and all that were findings once."""

import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")
pytest.importorskip("accelerate")
if not sys.platform.startswith("linux"):
    pytest.skip("the limits of a case are those of Linux", allow_module_level=True)

from tests.fuzz.doors import DOORS

ROOT = pathlib.Path(__file__).parents[2]
FOUND = json.loads((pathlib.Path(__file__).parent / "found.json").read_text(encoding="utf-8"))


def outcomes(door, seeds):
    """What each seed comes to, in a process of its own, which a case may end."""
    command = [sys.executable, "-m", "tests.fuzz", "--work", door, ",".join(map(str, seeds))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return [outcome for outcome in found if len(outcome) == 3]


@pytest.mark.parametrize("door", FOUND)
def test_what_was_found_once_is_refused(door):
    found = outcomes(door, FOUND[door])
    assert [outcome for outcome in found if outcome[1] == "finding"] == []
    assert len(found) == len(FOUND[door])


@pytest.mark.extended
@pytest.mark.parametrize("door", DOORS)
def test_files_that_are_changed_at_random_are_loaded_or_refused(door):
    seeds = range(1_000_000, 1_000_000 + 30 * DOORS[door].share)  # `make fuzz` begins at 0
    found = outcomes(door, seeds)
    assert [outcome for outcome in found if outcome[1] == "finding"] == []
    assert {outcome[1] for outcome in found} == {"loaded", "refused"}  # neither all nor none is refused
    assert len(found) == len(seeds)
