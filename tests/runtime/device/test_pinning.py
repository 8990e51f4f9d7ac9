"""Tests of roundpipe_runtime.device.pinning: a model in pinned memory, also after parts of it were replaced."""

import types

import pytest
import torch
from torch import nn

from roundpipe_runtime import DeviceError
from roundpipe_runtime.device import pinning
from roundpipe_runtime.device.accelerator import AcceleratorDevice
from roundpipe_runtime.device.pinning import PinnedModel


@pytest.fixture
def devices():
    """What stands for an accelerator: nothing is copied to it."""
    made = AcceleratorDevice.__new__(AcceleratorDevice)
    made.name, made.torch_device = "cuda:0", types.SimpleNamespace(type="xpu")
    return [made]


@pytest.fixture(autouse=True)
def slab_addresses(monkeypatch):
    """Memory in place of pinned memory, which takes an accelerator; the first and the last address of each slab."""
    found = []

    def allocate(nbytes):
        memory = memoryview(bytearray(nbytes))
        first = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        found.append((first, first + nbytes))
        return memory

    monkeypatch.setattr(pinning, "_allocate", allocate)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: is_in(tensor, found))
    return found


def is_in(tensor, addresses):
    return any(first <= tensor.data_ptr() < last for first, last in addresses)


def test_parameters_and_buffers_are_pinned_and_keep_their_values(devices, slab_addresses):
    """The objects stay; a buffer that is a view of a parameter stays pageable, it would be cut loose otherwise."""
    model = nn.Linear(8, 4)
    model.register_buffer("table", torch.arange(6.0))
    model.register_buffer("view", model.weight.detach()[0])
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    PinnedModel(model, "alloc", devices)
    assert {id(tensor) for tensor in (*model.parameters(), *model.buffers())} == held
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert [name for name, value in model.state_dict().items() if not is_in(value, slab_addresses)] == ["view"]


def test_parameters_that_are_parts_of_one_tensor_stay_parts_of_it(devices, slab_addresses):
    """An optimizer of the flat tensor goes on updating the model: what it writes is in the parameters."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    flat = torch.cat([parameter.detach().flatten() for parameter in model[0].parameters()])
    start = 0
    for parameter in model[0].parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    PinnedModel(model, "alloc", devices)
    flat.fill_(3.0)
    assert all(parameter.eq(3.0).all() for parameter in model[0].parameters())
    assert all(is_in(parameter, slab_addresses) for parameter in model[1].parameters())


def test_what_was_replaced_is_pinned_before_the_next_run(devices, slab_addresses):
    """``load_state_dict(assign=True)`` puts pageable tensors in the places of pinned ones."""
    model = nn.Linear(8, 4)
    pinned = PinnedModel(model, "alloc", devices)
    model.load_state_dict({"weight": torch.ones(4, 8), "bias": torch.ones(4)}, assign=True)
    assert not is_in(model.weight, slab_addresses)
    pinned.update()
    assert is_in(model.weight, slab_addresses)
    assert model.weight.eq(1).all()
    allocated = len(slab_addresses)
    pinned.update()
    assert len(slab_addresses) == allocated


@pytest.mark.parametrize("how", ["off", "alloc"])
def test_nothing_is_pinned_without_need(how, devices, slab_addresses):
    PinnedModel(nn.Linear(8, 4), how, devices if how == "off" else [])
    assert slab_addresses == []


class FakeDriver:
    """The functions of CUDA's library, for an accelerator that has them."""

    def __init__(self):
        self.status, self.registered = 0, []

    def cudaHostRegister(self, start, nbytes, flags):  # noqa: N802  # CUDA's name
        self.registered.append((start, nbytes))
        return self.status

    def cudaHostUnregister(self, start):  # noqa: N802  # CUDA's name
        self.registered = [one for one in self.registered if one[0] != start]
        return 0


@pytest.fixture
def cuda(monkeypatch, devices):
    driver = FakeDriver()
    devices[0].torch_device = types.SimpleNamespace(type="cuda")
    monkeypatch.setattr(pinning.torch.cuda, "cudart", lambda: driver)
    return driver


def test_pages_are_registered_once_and_given_back_with_the_model(devices, cuda):
    """Small parameters share pages, and CUDA refuses a page that it has."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    PinnedModel(model, "register", devices)
    pages = [page for start, nbytes in cuda.registered for page in range(start, start + nbytes, 4096)]
    assert len(pages) == len(set(pages))
    assert all(any(s <= p.data_ptr() and p.data_ptr() + p.nbytes <= s + n for s, n in cuda.registered)
               for p in model.parameters())  # fmt: skip
    assert all(start % 4096 == 0 and nbytes % 4096 == 0 for start, nbytes in cuda.registered)
    del model
    assert cuda.registered == []
    cuda.status = 712
    PinnedModel(nn.Linear(4, 4), "register", devices)
    cuda.status = 2
    with pytest.raises(DeviceError, match="CUDA error 2"):
        PinnedModel(nn.Linear(4, 4), "register", devices)
