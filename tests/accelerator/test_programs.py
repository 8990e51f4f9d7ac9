"""The programs of this folder: simulated models, parts of the tests, and mutants."""

import ast
import json
import os
from pathlib import Path

import pytest

from tests import fresh_process
from tests.accelerator.build import reason_not_to_build
from tests.accelerator.mutants import mutants, removals
from tests.accelerator.parts import PARTS, table

needs_backend = pytest.mark.skipif(reason_not_to_build() is not None, reason=str(reason_not_to_build()))


@needs_backend
@pytest.mark.slow
def test_a_model_is_simulated():
    arguments = ("--model", "tiny", "--microbatches", "2", "--tokens", "64", "--steps", "2")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LATE_DRY": "1", "LATE_DEVICES": "2"}
    command = ("-m", "benchmarks.simulated", *arguments)
    found = json.loads(fresh_process.run(*command, env=environment, imported=fresh_process.TRAINER).stdout)
    assert 0 < found["milliseconds"] < 1000
    assert all(0 < share < 1 for share in found["busy"].values())


_ROOT = Path(__file__).parents[2]


def test_every_test_of_the_runtime_is_in_one_part_and_the_table_counts():
    found = []
    for names in PARTS.values():
        for path in (_ROOT / name for name in names):
            found += [path] if path.is_file() else list(path.rglob("test_*.py"))
    assert sorted(found) == sorted((_ROOT / "tests" / "runtime").rglob("test_*.py"))
    rows = table(
        {
            "engine late 1": {"passed": 5, "listed": 2, "skipped": 1, "failed": []},
            "optim late 1": {"passed": 3, "listed": 0, "skipped": 0, "failed": ["test_a"]},
        }
    ).splitlines()
    assert rows[0] == "| folder | late, 1 | late, 2 | late, 4 | random, 1 | random, 2 | random, 4 |"
    assert "| `engine` | 5 + 2 | not run | not run | not run | not run | not run |" in rows
    assert "| `optim` | 3 + 0, 1 failed | not run | not run | not run | not run | not run |" in rows
    assert rows[-1] == "| all | 8 + 2, 1 failed | 0 + 0 | 0 + 0 | 0 + 0 | 0 + 0 | 0 + 0 |"


_SOURCE = """
def upload(self, ready, tensor):
    self.stream.wait_event(ready)
    with self._compute, quiet():
        host = empty(pin_memory=True)
    tensor.data = tensor.pin_memory()
    self.ends.popleft().synchronize()
    return tensor.result()
"""


def test_waits_streams_and_pins_are_removed():
    found = []
    for place in range(5):
        tree = ast.parse(_SOURCE)
        list(removals(tree))[place].remove()
        (changed,) = set(ast.unparse(tree).splitlines()) - set(ast.unparse(ast.parse(_SOURCE)).splitlines())
        found.append(changed.strip())
    assert sorted(found) == [
        "host = empty(pin_memory=False)",
        "self.ends.popleft()",
        "self.stream",
        "tensor.data = tensor.clone()",
        "with __import__('contextlib').nullcontext(), quiet():",
    ]
    assert len(list(removals(ast.parse(_SOURCE)))) == 5


def test_every_removal_has_a_name_of_its_own():
    names = [mutant.name for mutant in mutants()]
    assert len(set(names)) == len(names)
    assert "accelerator.py:computing: return self._compute" in names
