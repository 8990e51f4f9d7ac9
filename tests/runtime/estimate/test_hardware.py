"""Devices and host, as a plan sees them."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from roundpipe_runtime import ConfigError
from roundpipe_runtime.estimate import hardware
from roundpipe_runtime.estimate.hardware import describe_hardware, host_memory_available


def test_virtual_devices_are_measured():
    """They are here: nothing is assumed, and the memory has no limit."""
    found = describe_hardware("virtual:3")
    assert found.names == ("virtual:0", "virtual:1", "virtual:2")
    assert found.is_virtual
    assert found.origin == {"flops": "measured", "link": "measured", "memory": "unknown"}
    assert found.flops > 1e8
    assert found.link > 1e7


def test_virtual_devices_share_the_cores(monkeypatch):
    """Four devices with two threads each compute at half the rate on four cores."""
    monkeypatch.setattr(hardware, "matmul_rate", lambda device, dtype: 8e9)
    monkeypatch.setattr(hardware, "cores", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert describe_hardware("virtual:4", link=1e9).flops == 4e9
    assert describe_hardware("virtual:1", link=1e9).flops == 8e9


@pytest.mark.parametrize(("flops", "rows"), [(1e9, 512), (1e12, 2048), (1e15, 8192)])
def test_a_slow_device_is_measured_with_small_matrices(monkeypatch, flops, rows):
    """Each size multiplies the work by eight; the first product that takes 10 ms is enough, or the largest."""
    sizes = []

    def seconds(work, device):
        sizes.append(len(work()))
        return 2 * sizes[-1] ** 3 / flops

    monkeypatch.setattr(hardware, "_seconds", seconds)
    assert hardware.matmul_rate(torch.device("meta")) == pytest.approx(flops)
    assert sizes[-1] == rows


@pytest.mark.skipif(torch.accelerator.is_available(), reason="these devices would be here")
def test_devices_that_are_not_here_are_assumed_and_said_to_be():
    """A plan for another machine: what is given is taken, the rest is assumed."""
    found = describe_hardware("cuda:0,cuda:1", memory=24 * 2**30, flops=150e12)
    assert found.names == ("cuda:0", "cuda:1")
    assert not found.is_virtual
    assert (found.memory, found.flops) == (24 * 2**30, 150e12)
    assert found.origin == {"flops": "given", "link": "assumed", "memory": "given"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "names no device") for text in ("", "gpu5x", "cpu", "meta", "cuda:x", "cuda:0,,", "virtual:0")),
        ("cuda:0,cuda:0", "twice"),
    ],
)
def test_names_that_stand_for_no_device_or_for_the_same_are_refused(text, message):
    """The error says what to type."""
    with pytest.raises(ConfigError, match=message):
        describe_hardware(text)


def test_limits_of_a_container_count(monkeypatch):
    """The host has what the system says or what the container may take, whichever is less."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10))
    monkeypatch.setattr(hardware, "_left_in_container", lambda: 7)
    assert host_memory_available() == 7
    monkeypatch.setattr(hardware, "_left_in_container", lambda: None)
    assert host_memory_available() == 10
