"""What an accelerator of the runtime does with its streams."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipe
from roundpipe_runtime.device.accelerator import copy_in_pieces
from roundpipe_runtime.device.pinning import PinnedModel
from roundpipe_runtime.device.protocol import Device
from tests.accelerator import late
from tests.accelerator.training import late_devices, train
from tests.runtime.small import same_bits


@pytest.fixture
def device():
    late.set_order("late")
    (made,) = late_devices(1)
    yield made
    made.close()


def test_it_is_a_device(device):
    assert isinstance(device, Device)


def test_an_activation_does_not_queue_behind_parameters(device):
    weights = torch.ones(3).pin_memory()
    there = device.copy_in(weights, parameter=True)
    activation = device.copy_in(torch.ones(2).pin_memory())
    device._activations.synchronize()
    weights.fill_(5)
    with device.computing():
        assert (activation.tolist(), there.tolist()) == ([1, 1], [5, 5, 5])


def test_a_tensor_may_be_written_in_place_after_its_download_was_given(device):
    with device.computing():
        there = torch.ones(3, device=device.torch_device)
    host, event = device.copy_out(there)
    with device.computing():
        there.fill_(5)
    device._compute.synchronize()
    event.result()
    assert host.tolist() == [1, 1, 1]


def test_the_host_waits_for_what_is_computed_of_a_sparse_gradient(device):
    """The host waits for it. There are no sparse tensors here: a dense one states their layout."""

    class Sparse(torch.Tensor):
        layout = torch.sparse_coo

    with device.computing():
        there = torch.ones(3, device=device.torch_device).as_subclass(Sparse)
    host, event = device.copy_out(there)
    assert event.done()
    assert host.tolist() == [1, 1, 1]


def test_an_upload_waits_for_an_event_of_another_kind(device):
    host = torch.zeros(3).pin_memory()

    class Event:
        def done(self):
            return False

        def result(self):
            host.fill_(3)

    copy = device.copy_in(host, Event())
    with device.computing():
        assert copy.tolist() == [3, 3, 3]


@pytest.mark.parametrize("seed", range(3))
def test_parameters_may_change_as_soon_as_a_call_returns(seed):
    found = []
    for order in ("eager", "random"):
        late.set_order(order, seed)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        pipe = RoundPipe(model, devices=late_devices(2))
        pipe.forward_backward((torch.ones(6, 4),), loss_fn=lambda outputs, _: outputs.square().mean())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        for number in range(2):
            torch.accelerator.synchronize(number)
        assert same_bits(found[-1], [parameter.grad for parameter in model.parameters()])
        pipe.close()
    assert same_bits(*found)


def test_a_download_is_pinned(device):
    late.counts()
    with device.computing():
        there = torch.ones(1000, device=device.torch_device)
    host, event = device.copy_out(there)
    assert host.is_pinned()
    assert not host.eq(1).all()
    event.result()
    assert host.eq(1).all()
    assert late.counts()["bytes down, pinned"] == 4000


def test_all_copies_of_a_training_are_pinned():
    late.set_order("late")
    late.counts()
    train(late_devices(2))
    found = late.counts()
    assert "bytes down, pageable" not in found or found["bytes down, pageable"] < 100
    assert found.get("bytes up, pageable", 0) < 100


class Labelled(torch.Tensor):
    """A tensor of a class that knows itself where its data is."""


@pytest.mark.parametrize("make", [lambda w: w.as_subclass(Labelled), lambda w: w[:, ::2]], ids=["class", "gaps"])
def test_what_fits_into_no_slab_is_pinned_alone(device, make):
    weight = make(torch.arange(12.0).reshape(3, 4))
    kind, expected = type(weight), weight.tolist()
    model = nn.Module()
    model.weight = nn.Parameter(weight)
    del weight  # while another tensor has the memory, the parameter is taken for a part of it
    PinnedModel(model, "alloc", [device])
    assert model.weight.is_pinned()
    assert type(model.weight.data) is kind
    assert model.weight.tolist() == expected


def test_the_host_runs_two_stages_ahead_at_most(device):
    flags = [torch.zeros(1).pin_memory() for _ in range(4)]
    found = []
    for flag in flags:
        with device.visit():
            found.append([int(flag.item()) for flag in flags])
            with device.computing():
                flag.copy_(torch.ones(1, device=device.torch_device), non_blocking=True)
    assert found == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]


def test_gradients_of_one_stage_only_are_still_under_way(device):
    targets = [torch.zeros(1).pin_memory() for _ in range(4)]
    found = []
    for target in targets:
        with device.visit():
            found.append([int(target.item()) for target in targets])
            with device.computing():
                gradient = torch.ones(1, device=device.torch_device)
            device.copy_out(gradient, last=True, parameter=True, target=target)
    assert found == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize(("nbytes", "pieces"), [(16, 3), (40, 1), (1, 10)])
def test_large_parameters_travel_in_pieces(device, nbytes, pieces):
    """Ten floats at 16 bytes a piece are three copies."""
    there, source = torch.empty(10, device=device.torch_device), torch.arange(10.0).pin_memory()
    late.counts()
    copy_in_pieces(there, source, nbytes)
    assert late.counts()["copies up, pinned"] == pieces
    assert there.cpu().equal(source)
