"""Devices: copies are real, memory is counted, and a checking device refuses what an accelerator would get wrong."""

import threading
from concurrent.futures import Future

import pytest
import torch

from roundpipe_runtime import ConfigError, DeviceError, DeviceMemoryError, UseAfterReleaseError
from roundpipe_runtime.device.accelerator import parse_devices
from roundpipe_runtime.device.virtual import VirtualDevice


@pytest.fixture
def device():
    made = VirtualDevice("virtual:0", check=True)
    yield made
    made.close()


def test_copies_share_no_memory_with_the_host(device):
    host = torch.arange(4.0)
    copy = device.copy_in(host)
    host.zero_()
    back, event = device.copy_out(copy)
    copy.fill_(-1)
    assert event.done()
    assert back.tolist() == [0, 1, 2, 3]


def test_copies_keep_dtype_and_strides(device):
    """A transposed tensor stays transposed, so that kernels take the same path on either side."""
    host = torch.arange(6, dtype=torch.int16).reshape(2, 3).T
    copy = device.copy_in(host)
    assert (copy.dtype, copy.stride()) == (torch.int16, host.stride())
    assert torch.equal(copy, host)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
def test_released_memory_is_poisoned_and_refused(device, dtype):
    copy = device.copy_in(torch.zeros(2, dtype=dtype))
    device.release([copy])
    assert not torch.equal(copy, torch.zeros(2, dtype=dtype))
    with pytest.raises(UseAfterReleaseError, match=r"reads a .*shape \(2,\) after its release"):
        device.use([copy])


def test_memory_of_another_device_is_refused(device):
    other = VirtualDevice("virtual:1", check=True)
    copy = other.copy_in(torch.zeros(2))
    with pytest.raises(UseAfterReleaseError, match="memory of virtual:1"):
        device.use([copy])
    with pytest.raises(UseAfterReleaseError, match="is on virtual:1"):
        device.copy_in(copy)
    with pytest.raises(UseAfterReleaseError, match="memory of virtual:1"):
        device.copy_out(copy)


def test_a_copy_before_its_event_is_refused(device):
    """In check mode an event that has not passed is an error; otherwise it is waited for."""
    event = Future()
    with pytest.raises(UseAfterReleaseError, match="before its event"):
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


@pytest.mark.parametrize(
    "wrong", ["virtual:0", "virtual:", "virtual:2:slow", "nonsense", [], ["cpu"], ["meta"], 3, torch.device("cpu")]
)
def test_what_names_no_device_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"virtual:[2N]"):
        parse_devices(wrong)


def test_a_device_twice_is_refused():
    device = VirtualDevice("virtual:0")
    with pytest.raises(ConfigError, match="twice"):
        parse_devices([device, device])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_an_accelerator_that_is_not_there_is_an_error():
    with pytest.raises(DeviceError, match="no accelerator"):
        parse_devices(["cuda:0"])


def test_sparse_tensors_travel_through_a_checking_device(device):
    """They have no memory of one piece to watch: gradients of sparse embeddings come down all the same."""
    sparse = torch.sparse_coo_tensor([[1]], [[2.0, 3.0]], (3, 2), check_invariants=True)
    copy = device.copy_in(sparse)
    back, event = device.copy_out(copy)
    event.result()
    device.release([copy])
    assert torch.equal(back.to_dense(), sparse.to_dense())
