"""The doctor looks over an accelerator, and measures what a dry run is set to."""

import dataclasses
import json
import os

import pytest
import torch

from roundpipe_runtime.cli import doctor
from roundpipe_runtime.estimate.device_rates import DeviceRates
from tests import fresh_process
from tests.accelerator import late

_PROGRAM = """
import dataclasses, json, os, torch
from tests.accelerator import late
from roundpipe_runtime.estimate.device_rates import measure_device
late.set_costs(flops=120e12, memory=0.9e12, link=25e9, pageable_link=6e9)
print(json.dumps(dataclasses.asdict(measure_device(torch.device("late", 0)))), flush=True)
os._exit(0)
"""


def test_rates_are_those_of_the_device():
    """25 GB/s each way at the same time, 6 GB/s pageable, 120 TFLOP/s, and copies next to kernels."""
    done = fresh_process.run("-c", _PROGRAM, env={**os.environ, "LATE_DRY": "1"})
    found = json.loads(done.stdout)
    expected = {"up": 25e9, "down": 25e9, "both": 50e9, "pageable_up": 6e9, "pageable_down": 6e9, "flops": 120e12}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=0.02)
    assert found["overlap"] == pytest.approx(1.0, abs=0.05)


def test_every_device_is_looked_over():
    late.set_order("late")
    found = {check.name: check for check in doctor.examine()}
    for number in range(late.DEVICES):
        assert {f"{what} late:{number}" for what in ("link of", "speed of", "streams of", "events of", "plan for")} <= {
            *found
        }
    assert "of 17.2 GB free" in found["late:3"].found
    assert found["training on late:0, late:1, late:2, late:3"].status == "ok"
    assert [check for check in found.values() if check.status == "fail"] == []


RATES = DeviceRates(50e9, 40e9, 80e9, 8e9, 6e9, 500e12, 0.95, 1.0)


@pytest.mark.parametrize(
    ("changed", "what", "status", "words"),
    [
        ({}, "link of", "ok", "50 GB/s up, 40 GB/s down, 80 GB/s both at once"),
        ({"down": 3e9}, "link of", "warning", "3 GB/s down"),
        ({}, "streams of", "ok", "95%"),
        ({"overlap": 0.1}, "streams of", "warning", "10%"),
        ({}, "events of", "ok", "1.00 s"),
        ({"clock": 0.01}, "events of", "warning", "0.01 s"),
        ({}, "speed of", "ok", "500 TFLOP/s"),
        # 2 bytes up at 50 GB/s take as long as 2 operations of 10,000 tokens at 500 TFLOP/s
        ({}, "plan for", "ok", "from 10,000 tokens per step on"),
    ],
)
def test_what_was_measured_is_judged(monkeypatch, changed, what, status, words):
    rates = dataclasses.replace(RATES, **changed)
    monkeypatch.setattr(doctor, "measure_device", lambda device: rates)
    (found,) = (check for check in doctor.device_checks(torch.device("late:0")) if check.name == f"{what} late:0")
    assert found.status == status
    assert words in found.found
    assert bool(found.remedy) is (status != "ok")
