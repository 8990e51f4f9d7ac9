"""An accelerator's copies run beside its computation, and nothing is read before it is there."""

import types

import pytest
import torch

from roundpipe_runtime.device import accelerator
from roundpipe_runtime.device.accelerator import AcceleratorDevice, copy_in_pieces


@pytest.mark.parametrize(
    ("source", "nbytes"),
    [
        (torch.arange(10.0), 16),
        (torch.arange(10.0), 40),
        (torch.arange(12.0).reshape(3, 4), 16),
        (torch.arange(12.0).reshape(3, 4).T, 16),
        (torch.tensor(3.0), 1),
        (torch.empty(0), 16),
    ],
)
def test_a_copy_in_pieces_is_a_copy(source, nbytes):
    target = torch.full_like(source, float("nan"))
    copy_in_pieces(target, source, nbytes)
    assert torch.equal(target, source)


class FakeTorch:
    """What torch reports of the memory of an accelerator, in GB."""

    def __init__(self, free, total, reserved):
        self.accelerator = self
        self.free, self.total, self.reserved = free, total, reserved

    def get_memory_info(self, device):
        return self.free, self.total

    def memory_reserved(self, device):
        return self.reserved


@pytest.mark.parametrize(("free", "reserved", "expected"), [(80, 0, 80), (30, 50, 80), (30, 10, 40), (80, 20, 80)])
def test_memory_is_what_other_processes_leave(monkeypatch, free, reserved, expected):
    """Of 80 GB: all, all of it with what this process has, the half, and never more than there is."""
    monkeypatch.setattr(accelerator, "torch", FakeTorch(free, 80, reserved))
    assert AcceleratorDevice.memory.fget(types.SimpleNamespace(torch_device=None)) == expected


def test_memory_that_cannot_be_asked_for_is_not_known(monkeypatch):
    """Neither torch nor the module of the backend has such a function."""
    backend = types.SimpleNamespace(get_device_module=lambda device: types.SimpleNamespace())
    backend.accelerator = types.SimpleNamespace()
    monkeypatch.setattr(accelerator, "torch", backend)
    assert AcceleratorDevice.memory.fget(types.SimpleNamespace(torch_device=None)) is None
