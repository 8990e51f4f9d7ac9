"""Devices and host, as a plan sees them: measured, typed in, or read from a file."""

import json
from types import SimpleNamespace

import psutil
import pytest
import torch

from roundpipe_runtime import ConfigError
from roundpipe_runtime.estimate import Hardware, hardware, load_machine, save_machine
from roundpipe_runtime.estimate.hardware import describe_hardware, host_memory_available


def test_virtual_devices_are_measured_and_share_the_cores(monkeypatch):
    """Nothing is assumed, memory has no limit. Four devices of two threads compute at half the rate on four cores."""
    found = describe_hardware("virtual:3")
    assert found.names == ("virtual:0", "virtual:1", "virtual:2")
    assert found.is_virtual
    assert found.origin == {"flops": "measured", "link": "measured", "memory": "unknown"}
    assert found.flops > 1e8
    assert found.link > 1e7
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


TYPED = {"names": ["cuda:0", "cuda:1"], "flops": 150e12, "link": 25e9, "memory": 24e9, "host_rate": 60e9}


def test_what_was_saved_or_typed_in_is_loaded(tmp_path):
    """What is not stated is not known."""
    measured = Hardware(("xpu:0",), "xpu", 1e13, 1e10, 10**10, 10**11, 5e10, {"flops": "measured"}, 9e9, 1e-4)
    save_machine(measured, tmp_path / "here.json")
    assert load_machine(tmp_path / "here.json") == measured
    (tmp_path / "shop.json").write_text(json.dumps(TYPED))
    found = load_machine(tmp_path / "shop.json")
    assert (found.names, found.kind, found.memory) == (("cuda:0", "cuda:1"), "cuda", 24 * 10**9)
    assert (found.host, found.down, found.call, found.is_virtual) == (None, None, 0.0, False)
    assert found.origin == {"flops": "given", "link": "given", "memory": "given"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("{", "is not JSON"),
        ("[]", "Expected `object`"),
        (json.dumps({"names": ["cuda:0"]}), r"flops is missing.*\n.*roundpipe doctor --machine"),
        (json.dumps({**TYPED, "ram": 1}), "ram is an unknown entry"),
        (json.dumps({**TYPED, "names": []}), "names must be a list"),
        (json.dumps({**TYPED, "link": "25 GB/s"}), "link must be a number above 0, found '25 GB/s'"),
        (json.dumps({**TYPED, "origin": 5}), r"machine\.json: origin must map keys to sources.*, found 5"),
        (json.dumps({**TYPED, "origin": {"flops": 5}}), "origin must map keys to sources"),
        (json.dumps({**TYPED, "kind": {"a": 1}}), "kind must be the type of the devices"),
        (json.dumps({**TYPED, "memory": 0}), "memory must be a number above 0"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path, content, message):
    """Before anything is planned with it."""
    (tmp_path / "machine.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_machine(tmp_path / "machine.json")
