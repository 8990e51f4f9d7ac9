"""The benchmarks of accelerators run on the reference accelerator, so that time on another one goes into numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench_gpu import CONTESTANTS, agree, copied_bytes
from tests.accelerator.build import reason_not_to_build

_ROOT = Path(__file__).parents[2]

needs_backend = pytest.mark.skipif(reason_not_to_build() is not None, reason=str(reason_not_to_build()))


def run(*arguments, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *arguments], cwd=_ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_backend
@pytest.mark.slow  # five programs, each in a process that imports torch and transformers
def test_every_program_trains_the_same_model(tmp_path):
    """Losses agree; one that is not installed states so; the bytes of a step are counted."""
    file = tmp_path / "found.json"
    run("benchmarks/bench_gpu.py", "--device", "late:0", "--shapes", "tiny", "--seconds", "0", "--json", str(file))
    found = json.loads(file.read_text())["shapes"]["tiny"]
    assert found.keys() == CONTESTANTS.keys()
    assert found.pop("RoundPipe") == {"error": "roundpipe is not installed"}
    assert not [one for one in found.values() if "error" in one]
    ours, resident = found["this runtime"], found["PyTorch, all on the device"]
    assert ours["losses"] == pytest.approx(resident["losses"], rel=0.02)
    assert ours["link bytes"]["up"] > 10 * resident["link bytes"]["up"]


@needs_backend
@pytest.mark.slow  # a process that imports torch and transformers
def test_a_model_is_simulated():
    """A step of a small Llama on two devices: some time, in which kernels ran and links were used."""
    arguments = ("--model", "tiny", "--microbatches", "2", "--tokens", "64", "--steps", "2")
    found = json.loads(run("-m", "benchmarks.simulated", *arguments, LATE_DRY="1", LATE_DEVICES="2"))
    assert 0 < found["milliseconds"] < 1000
    assert all(0 < share < 1 for share in found["busy"].values())


def test_copies_of_a_profile_are_added_up():
    """As the profiler of torch writes them for CUDA; other events do not count."""
    events = [
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 100}},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "args": {"bytes": 5}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 40}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "args": {"bytes": 7}},
        {"cat": "kernel", "name": "copy HtoD"},
        {"name": "process_name", "args": {}},
    ]
    assert copied_bytes(events) == {"up": 105, "down": 40}


def test_another_loss_than_that_of_pytorch_is_named():
    found = {
        "this runtime": {"losses": [2.0, 1.0]},
        "PyTorch, all on the device": {"losses": [2.01, 1.0]},
        "FSDP2, CPU offload": {"losses": [float("nan")]},
        "RoundPipe": {"error": "not installed"},
    }
    assert agree(found) == ["FSDP2, CPU offload"]
