"""Devices, how they are named, and their clocks."""

import threading
import types
from concurrent.futures import Future

import pytest
import torch
from torch import nn

from roundpipe_runtime import ConfigError, DeviceMemoryError, Timeline, UseAfterReleaseError, VirtualDevice
from roundpipe_runtime.device import accelerator
from roundpipe_runtime.device.accelerator import AcceleratorDevice, copy_in_pieces, parse_devices
from roundpipe_runtime.device.protocol import EventClock
from roundpipe_runtime.engine.planner import Planner
from roundpipe_runtime.engine.run import Timer
from roundpipe_runtime.schedule.partitioning import LayerCost, MeasuredCosts


@pytest.fixture
def device():
    made = VirtualDevice("virtual:0", check=True)
    yield made
    made.close()


def test_copies_share_no_memory_with_the_host_and_keep_dtype_and_strides(device):
    """A transposed tensor stays transposed, so that kernels take the same path on either side."""
    host = torch.arange(6, dtype=torch.int16).reshape(2, 3).T
    copy = device.copy_in(host)
    assert (copy.dtype, copy.stride()) == (torch.int16, host.stride())
    before = host.tolist()
    host.zero_()
    back, event = device.copy_out(copy)
    copy.fill_(-1)
    assert event.done()
    assert back.tolist() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
def test_released_memory_is_poisoned_and_refused(device, dtype):
    copy = device.copy_in(torch.zeros(2, dtype=dtype))
    device.release([copy])
    assert not torch.equal(copy, torch.zeros(2, dtype=dtype))
    with pytest.raises(UseAfterReleaseError, match=r"reads a .*shape \(2,\) after this device released it"):
        device.use([copy])


def test_memory_of_another_device_is_refused_and_sparse_tensors_travel(device):
    """They have no memory of one piece to watch: gradients of sparse embeddings come down all the same."""
    copy = VirtualDevice("virtual:1", check=True).copy_in(torch.zeros(2))
    with pytest.raises(UseAfterReleaseError, match="memory of virtual:1"):
        device.use([copy])
    with pytest.raises(UseAfterReleaseError, match="is on virtual:1"):
        device.copy_in(copy)
    with pytest.raises(UseAfterReleaseError, match="memory of virtual:1"):
        device.copy_out(copy)
    sparse = torch.sparse_coo_tensor([[1]], [[2.0, 3.0]], (3, 2), check_invariants=True)
    copy = device.copy_in(sparse)
    back, event = device.copy_out(copy)
    event.result()
    device.release([copy])
    assert torch.equal(back.to_dense(), sparse.to_dense())


def test_a_copy_before_its_event_is_refused(device):
    event = Future()
    with pytest.raises(UseAfterReleaseError, match="before the event"):
        device.copy_in(torch.zeros(2), event)
    patient = VirtualDevice("virtual:9")
    threading.Timer(0.05, event.set_result, [None]).start()
    patient.copy_in(torch.zeros(2), event)
    assert event.done()


def test_memory_is_counted_until_it_is_released_or_dropped():
    device = VirtualDevice("virtual:0", memory_limit=100)
    one, two = device.copy_in(torch.zeros(10)), device.copy_in(torch.zeros(5))
    assert device.allocated == 60
    with pytest.raises(DeviceMemoryError, match="uses 60 of 100 bytes, and 44 more"):
        device.copy_in(torch.zeros(11))
    device.release([one])
    assert device.allocated == 20
    del two
    assert device.allocated == 0
    assert device.peak == 60


def test_every_way_to_name_devices():
    assert [d.name for d in parse_devices("virtual:3")] == ["virtual:0", "virtual:1", "virtual:2"]
    assert all(d.check for d in parse_devices("virtual:2:check"))
    shared = parse_devices("virtual:1")
    assert parse_devices(shared) == shared
    if not torch.accelerator.is_available():
        assert [d.name for d in parse_devices()] == ["virtual:0", "virtual:1"]


def test_what_names_no_device_is_refused():
    for wrong in ("virtual:0", "virtual:", "virtual:2:slow", "nonsense", [], ["cpu"], ["meta"], 3, torch.device("cpu")):
        with pytest.raises(ConfigError, match=r"virtual:[2N]"):
            parse_devices(wrong)
    with pytest.raises(ConfigError, match="twice"):
        parse_devices([VirtualDevice("virtual:0")] * 2)


@pytest.mark.parametrize(("source", "nbytes"), [
    (torch.arange(10.0), 16), (torch.arange(10.0), 40), (torch.arange(12.0).reshape(3, 4), 16),
    (torch.arange(12.0).reshape(3, 4).T, 16), (torch.tensor(3.0), 1), (torch.empty(0), 16),
])  # fmt: skip
def test_a_copy_in_pieces_is_a_copy(source, nbytes):
    target = torch.full_like(source, float("nan"))
    copy_in_pieces(target, source, nbytes)
    assert torch.equal(target, source)


@pytest.mark.parametrize(("free", "reserved", "expected"), [(80, 0, 80), (30, 50, 80), (30, 10, 40), (80, 20, 80)])
def test_memory_is_what_other_processes_leave(monkeypatch, free, reserved, expected):
    backend = types.SimpleNamespace()
    backend.get_memory_info, backend.memory_reserved = lambda device: (free, 80), lambda device: reserved
    monkeypatch.setattr(accelerator, "torch", types.SimpleNamespace(accelerator=backend))
    assert AcceleratorDevice.memory.fget(types.SimpleNamespace(torch_device=None)) == expected
    # neither torch nor the module of the backend has such functions
    accelerator.torch.accelerator, accelerator.torch.get_device_module = types.SimpleNamespace(), lambda device: None
    assert AcceleratorDevice.memory.fget(types.SimpleNamespace(torch_device=None)) is None


class FakeStream:
    """A stream that reaches its events at given times."""

    def __init__(self, *seconds):
        self.seconds = iter(seconds)

    def record_event(self, event):
        moment = next(self.seconds)
        return types.SimpleNamespace(moment=moment, elapsed_time=lambda other: 1e3 * (other.moment - moment))


def accelerator_with(compute, others):
    made = EventClock(torch.device("cpu"), compute, others)
    return types.SimpleNamespace(name="cuda:0", clock=lambda: made)


def test_an_accelerator_is_measured_by_its_own_clock():
    device = accelerator_with(FakeStream(10.0, 10.0, 11.0, 11.0, 15.0), {"upload": FakeStream(10.5, 12.0)})
    costs, timeline = MeasuredCosts([LayerCost(1.0, 3.0), LayerCost(1.0, 3.0)]), Timeline()
    timer = Timer(costs, timeline)
    for layer in range(2):
        with timer.measure("forward", 0, device, 0, layer):
            pass
    with timer.measure("upload", 1, device, layer=2):
        pass
    assert not costs.is_measured
    timer.finish()
    assert [cost.forward for cost in costs.costs()] == pytest.approx([1.0, 4.0])
    start = timeline.records[0].start
    assert [(record.kind, record.start - start, record.end - start) for record in timeline.records] == [
        ("forward", pytest.approx(0.0), pytest.approx(1.0)),
        ("forward", pytest.approx(1.0), pytest.approx(5.0)),
        ("upload", pytest.approx(0.5), pytest.approx(2.0)),
    ]


@pytest.mark.parametrize(
    ("on_host", "timeline", "is_measured"), [(True, None, True), (False, None, False), (False, Timeline(), True)]
)
def test_without_events_an_accelerator_is_measured_for_a_timeline_only(on_host, timeline, is_measured):
    """What the host computes is known at once."""
    costs = MeasuredCosts([LayerCost(1.0, 3.0)])
    timer = Timer(costs, timeline, with_events=False)
    device = VirtualDevice() if on_host else accelerator_with(FakeStream(10.0, 10.0, 11.0), {})
    with timer.measure("forward", 0, device, 0, 0):
        pass
    if not on_host:
        timer.finish()
    assert costs.is_measured == is_measured


def test_plans_are_made_of_what_the_runs_before_them_measured():
    """The first four runs of a kind, and then the two before the runs 9, 17 ..., which make a plan again."""
    planner = Planner([nn.Linear(1, 1)], [])
    measured = [number for number in range(1, 40) if planner.wants_events("fused")]
    assert measured == [1, 2, 3, 4, 7, 8, 15, 16, 31, 32]
    assert planner.wants_events("infer")
