"""Resident memory of a training, in a process of its own, next to what the plan states."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]
PROGRAM = ROOT / "benchmarks" / "bench_memory.py"
WAYS = {"float32, stepped in the backward": 12, "float32 in place, bfloat16 gradients": 14}
# Larger blocks go back to the system when they are freed, as in the benchmark.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="Linux counts the highest memory anew")
@pytest.mark.parametrize("way", WAYS)
def test_the_host_holds_what_the_plan_states(way):
    """48 layers of 1.25 million parameters: 12 or 14 bytes each, and within 3 % of the plan, device included.

    The process is limited to the plan and 3 %, so more would end it.
    """
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--one", "bytes", way, "60"],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parameters"] == 48 * 1120**2
    assert WAYS[way] < found["bytes per parameter"] < WAYS[way] + 0.6
    assert found["bytes per parameter"] == pytest.approx(found["planned"], rel=0.03)
