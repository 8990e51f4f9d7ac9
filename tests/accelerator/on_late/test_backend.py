"""The reference accelerator finds what it is there to find, and computes what the CPU does."""

import time

import pytest
import torch
from torch import nn

from tests import fresh_process
from tests.accelerator import late

F = nn.functional
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


def test_out_of_memory_is_an_error_and_ends_with_it():
    late.set_memory(0, 1 << 20)
    try:
        held = torch.ones(100_000, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError, match="late:0 is out of memory"):
            torch.ones(200_000, device=DEVICE)
        assert torch.accelerator.get_memory_info(0)[1] == 1 << 20
        del held
        assert torch.ones(200_000, device=DEVICE).sum().item() == 200_000
    finally:
        late.set_memory(0, 16 << 30)


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


def test_the_time_between_two_events_is_that_of_the_work_between_them():
    stream, other = torch.Stream(DEVICE), torch.Stream(DEVICE)
    start, end, long_start, long_end = (torch.Event(DEVICE, enable_timing=True) for _ in range(4))
    with other:
        large = torch.ones(600, 600, device=DEVICE)
        long_start.record(other)
        for _ in range(20):
            large @ large
        long_end.record(other)
    with stream:
        small = torch.ones(2, device=DEVICE)
        start.record(stream)
        small + small
        end.record(stream)
    end.synchronize()
    with pytest.raises(ValueError, match="enable_timing"):
        start.elapsed_time(stream.record_event())
    other.synchronize()
    assert 0 < start.elapsed_time(end) < long_start.elapsed_time(long_end) / 2


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


def test_a_device_computes_and_draws_as_the_cpu_does():
    host = torch.randn(3, 4)
    there = host.to(DEVICE)
    for compute in (
        lambda x: x @ x.T + 1,
        lambda x: (x > 0).nonzero(),
        lambda x: torch.cat([x, x], 1)[:, ::2].contiguous(),
        lambda x: x.clone().index_fill_(0, torch.tensor([1], device=x.device), 7).clamp_(max=3),
        lambda x: x[torch.tensor([2, 0])],
        lambda x: torch.view_as_complex(x.reshape(3, 2, 2).contiguous()).abs(),
        lambda x: torch.complex(x, x + 1).conj(),
        lambda x: torch.complex(x, x + 1).conj().imag.neg().clone(),
        lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 3, 4)] * 3),
        lambda x: x.unfold(1, 2, 1).sum(-1),
        lambda x: x.sum(),
    ):
        torch.testing.assert_close(compute(there).cpu(), compute(host))

    def gradients(device):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.GELU(), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 2)
        ).to(device)
        x = torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(1)).to(device)
        model(x).square().mean().backward()
        return [p.grad.cpu() for p in model.parameters()] + [b.cpu() for b in model.buffers()]

    for found, expected in zip(gradients(DEVICE), gradients("cpu"), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_device_draws_the_numbers_of_the_cpu_from_a_generator_of_its_own():
    def drawn(device):
        torch.manual_seed(3)
        noise, other = torch.randn(7, device=device), torch.rand(3, device=device)
        return [noise, other, F.dropout(torch.ones(100, device=device), 0.3), torch.randn(20, device=device)]

    for found, expected in zip(drawn(DEVICE), drawn("cpu"), strict=True):
        assert found.cpu().equal(expected)
    before = torch.get_rng_state()
    drawn_before = torch.rand(2, device=DEVICE)
    assert torch.get_rng_state().equal(before)
    torch.late.manual_seed(5)
    assert not drawn_before.equal(torch.rand(2, device=DEVICE))
