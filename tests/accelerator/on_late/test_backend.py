"""The reference accelerator finds what it is there to find; in a dry run its clocks go on by bytes and operations."""

import json
import os
import time

import pytest
import torch

from tests import fresh_process
from tests.accelerator import late

DEVICE = torch.device("late:0")


@pytest.fixture(autouse=True)
def as_late_as_may_be():
    late.set_order("late")
    late.counts()


def test_a_wait_that_is_missing_is_nan():
    uploads, compute = torch.Stream(DEVICE), torch.Stream(DEVICE)
    host = torch.ones(4).pin_memory()
    found = []
    for waits in (False, True):
        with uploads:
            there = torch.empty(4, device=DEVICE).copy_(host, non_blocking=True)
        if waits:
            compute.wait_event(uploads.record_event())
        with compute:
            found.append((there + 1).cpu())
    assert found[0].isnan().all()
    assert found[1].tolist() == [2, 2, 2, 2]


def test_memory_that_another_stream_reads_without_record_stream_is_nan():
    uploads, compute = torch.Stream(DEVICE), torch.Stream(DEVICE)
    found = []
    for records in (False, True):
        with uploads:
            there = torch.ones(1000, device=DEVICE)
        compute.wait_event(uploads.record_event())
        with compute:
            doubled = there * 2
        if records:
            there.record_stream(compute)
        del there
        uploads.synchronize()
        with compute:
            found.append(doubled.cpu())
    assert found[0].isnan().all()
    assert found[1].eq(2).all()


def test_memory_is_nan_used_again_on_its_stream_at_once_and_counted():
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated(0)
    torch.accelerator.reset_peak_memory_stats(0)
    first = torch.empty(2**20, device=DEVICE)
    assert torch.accelerator.memory_allocated(0) - before == first.nbytes
    assert first.cpu().isnan().all()
    address = first.data_ptr()
    del first
    assert torch.accelerator.memory_allocated(0) == before
    assert torch.accelerator.max_memory_allocated(0) - before == 2**22
    assert torch.empty(2**20, device=DEVICE).data_ptr() == address
    with torch.Stream(DEVICE):
        assert torch.empty(2**20, device=DEVICE).data_ptr() != address


def test_copies_of_pinned_memory_take_place_when_their_stream_comes_to_them_and_are_counted():
    """What the host changes too early is found; pageable memory was read when the call returned."""
    found = []
    for host in (torch.ones(4).pin_memory(), torch.ones(4)):
        there = torch.empty(4, device=DEVICE).copy_(host, non_blocking=True)
        host.fill_(5)
        found.append(there.cpu().tolist())
    assert found == [[5] * 4, [1] * 4]
    counted = late.counts()
    assert (counted["bytes up, pinned"], counted["bytes up, pageable"], counted["bytes down, pageable"]) == (16, 16, 32)
    there = torch.empty(1000, device=DEVICE).copy_(torch.ones(1000).pin_memory(), non_blocking=True)
    others = [torch.zeros(1000).pin_memory() for _ in range(4)]
    assert there.cpu().eq(1).all()  # it was kept for its copy
    host = others[0]
    host.copy_(there, non_blocking=True)
    before = host.tolist()  # a download that is not waited for is not there
    torch.accelerator.synchronize(0)
    assert (before, host.tolist()) == ([0] * 1000, [1] * 1000)


def test_nothing_runs_until_the_host_waits_where_an_error_of_a_kernel_comes():
    there = torch.ones(4, device=DEVICE)
    for _ in range(5):
        there = there + 1
    assert late.pending(0) >= 6
    assert there.cpu().tolist() == [6] * 4
    assert late.pending(0) == 0
    found = torch.ones(4, device=DEVICE).index_select(0, torch.tensor([9], device=DEVICE))
    with pytest.raises((IndexError, RuntimeError), match="index out of range"):
        found.cpu()
    assert torch.ones(2, device=DEVICE).tolist() == [1, 1]


@pytest.mark.parametrize("seed", range(5))
def test_a_random_order_runs_some_work_before(seed):
    def pending():
        late.set_order("random", seed)
        streams = [torch.Stream(DEVICE) for _ in range(3)]
        found = []
        for number in range(60):
            with streams[number % 3]:
                torch.ones(2, device=DEVICE)
            found.append(late.pending(0))
        torch.accelerator.synchronize(0)
        return found

    late.set_order("late")
    assert len(set(pending())) > 1


def test_the_host_cannot_read_memory_of_a_device_nor_mix_two():
    program = (
        "import ctypes, torch; from tests.accelerator import late\n"
        "there = torch.ones(4, device='late')\n"
        "print(ctypes.cast(there.data_ptr(), ctypes.POINTER(ctypes.c_float))[0])"
    )
    done = fresh_process.run("-c", program, check=False)
    assert done.returncode == -11
    *_, last = done.stderr.splitlines()
    assert last == "late: the host read or wrote memory of a device. Copy the tensor with .cpu() first."
    here, there = torch.ones(2, device="late:0"), torch.ones(2, device="late:1")
    for other in (there, torch.ones(2)):
        with pytest.raises(RuntimeError, match="same device"):
            here + other
    with pytest.raises(TypeError, match="late"):
        here.numpy()
    with torch.autocast("late", torch.bfloat16):
        assert (here.view(1, 2) @ here.view(2, 1)).dtype == torch.bfloat16


def test_an_event_passes_when_its_stream_comes_to_it():
    stream = torch.Stream(DEVICE)
    event = torch.Event(DEVICE)
    with stream:
        ones = torch.ones(4, device=DEVICE)
        event.record(stream)
        ones + ones
    assert late.pending(0) > 2
    event.synchronize()
    assert event.query()
    assert late.pending(0) > 0
    assert torch.Event(DEVICE).query()
    late.set_order("late")  # what was given before is done first
    with stream:
        for _ in range(5):
            torch.ones(4, device=DEVICE)
    event = stream.record_event()
    assert not event.query()
    for _ in range(10):  # who asks again and again is told one day
        event.query()
    assert event.query()


def test_no_work_begins_before_the_host_has_given_it():
    """So the clock of a device that is idle is that of the host."""
    stream = torch.Stream(DEVICE)
    first, second = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    begin = time.perf_counter()
    first.record(stream)
    time.sleep(0.02)
    second.record(stream)
    end = time.perf_counter()
    second.synchronize()
    assert 0.02 <= first.elapsed_time(second) / 1e3 <= end - begin


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
