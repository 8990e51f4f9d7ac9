"""The benchmarks of accelerators run on the reference accelerator, so that time on another one goes into numbers."""

import json
import os

import pytest

from benchmarks import bench_gpu
from benchmarks.bench_gpu import CONTESTANTS, agree, copied_bytes
from tests import fresh_process
from tests.accelerator.build import reason_not_to_build

needs_backend = pytest.mark.skipif(reason_not_to_build() is not None, reason=str(reason_not_to_build()))


def run(*arguments, **environment):
    """A program in a fork of a process that has imported transformers: most of its time would be that import."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return fresh_process.run(*arguments, env=environment, imported=fresh_process.TRAINER)


# the benchmark, with what the programs found, each in a process of its own, by their names
_MEASURE = """
import json, sys
from benchmarks import bench_gpu
found = json.loads(sys.argv.pop(1))
bench_gpu.apart = lambda name, *_: found[name]
sys.exit(bench_gpu.main())
"""


@needs_backend
@pytest.mark.slow  # five programs, each in a process of its own
@pytest.mark.extended
def test_every_program_trains_the_same_model(tmp_path, monkeypatch):
    """Losses agree; one that is not installed states so; the bytes of a step are counted."""
    program = ("-m", "benchmarks.bench_gpu")
    monkeypatch.setattr(bench_gpu.subprocess, "run", lambda command, **_: run(*program, *command[2:]))
    found = {name: bench_gpu.apart(name, "tiny", "late:0", 0) for name in CONTESTANTS}
    monkeypatch.undo()
    file = tmp_path / "found.json"
    options = ("--device", "late:0", "--shapes", "tiny", "--seconds", "0", "--json", file)
    run("-c", _MEASURE, json.dumps(found), *options)
    found = json.loads(file.read_text())["shapes"]["tiny"]
    assert found.keys() == CONTESTANTS.keys()
    assert found.pop("RoundPipe") == {"error": "roundpipe is not installed"}
    assert not [one for one in found.values() if "error" in one]
    ours, resident = found["this runtime"], found["PyTorch, all on the device"]
    assert ours["losses"] == pytest.approx(resident["losses"], rel=0.02)
    assert ours["link bytes"]["up"] > 10 * resident["link bytes"]["up"]


@needs_backend
@pytest.mark.slow
def test_a_model_is_simulated():
    """A step of a small Llama on two devices: some time, in which kernels ran and links were used."""
    arguments = ("--model", "tiny", "--microbatches", "2", "--tokens", "64", "--steps", "2")
    found = json.loads(run("-m", "benchmarks.simulated", *arguments, LATE_DRY="1", LATE_DEVICES="2").stdout)
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
