"""A dry run computes nothing, and its clocks go on by bytes and operations."""

import json
import os

import pytest

from tests import fresh_process

# Uploads of 500 MB on one stream; products of matrices on another, which wait for the first upload; all times in ms.
_PROGRAM = """
import json, os, torch
from tests.accelerator import late
uploads, compute = torch.Stream("late:0"), torch.Stream("late:0")
host = torch.empty(500_000_000, dtype=torch.uint8, pin_memory=True)
found = {}
late.set_order("eager")
with uploads:
    there = torch.empty(host.shape, dtype=torch.uint8, device="late:0")
    there.copy_(host, non_blocking=True)
    arrived = uploads.record_event()
    there.copy_(host, non_blocking=True)
uploads.synchronize()
found["two uploads"] = late.clock() * 1e3
one = torch.empty(8192, 8192, dtype=torch.bfloat16, device="late:0")
late.set_order("eager")
with uploads:
    there.copy_(host, non_blocking=True)
    arrived = uploads.record_event()
    there.copy_(host, non_blocking=True)
compute.wait_event(arrived)
with compute:
    for _ in range(10):
        one @ one
found["ten products after an upload"] = late.clock() * 1e3
late.set_order("eager")
small = torch.empty(2, device="late:0")
for _ in range(1000):
    small + small
found["a thousand launches"] = late.clock() * 1e3
late.set_order("eager")
torch.empty(80_000_000, dtype=torch.uint8).to("late:0")
found["a pageable upload"] = late.clock() * 1e3
print(json.dumps(found), flush=True)
os._exit(0)
"""


def test_the_clock_is_that_of_links_and_kernels():
    """50 GB/s from pinned and 8 GB/s from pageable memory, 500 TFLOP/s, 5 us a launch."""
    found = json.loads(fresh_process.run("-c", _PROGRAM, env={**os.environ, "LATE_DRY": "1"}).stdout)
    product = 2 * 8192**3 / 500e12 * 1e3
    assert found == {
        "two uploads": pytest.approx(20, rel=0.01),
        "ten products after an upload": pytest.approx(10 + 10 * product, rel=0.01),
        "a thousand launches": pytest.approx(5, rel=0.05),
        "a pageable upload": pytest.approx(10, rel=0.01),
    }
