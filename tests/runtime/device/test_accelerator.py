"""An accelerator's copies run beside its computation, and nothing is read before it is there."""

import types

import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
from roundpipe_runtime.device import accelerator
from roundpipe_runtime.device.accelerator import AcceleratorDevice, copy_in_pieces
from roundpipe_runtime.device.parse import parse_devices
from tests.runtime.small import (
    batch,
    cut_plan,
    gradients,
    relative_error,
    same_bits,
    small_model,
    state,
)

F = nn.functional
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator"),
]


def config(grain="stage"):
    plan = cut_plan(9, [2, 4], [3, 5], 2)
    return RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3, execute_plan=plan, recompute_grain=grain)


def train(devices, grain="stage"):
    """Losses, gradients, buffers and weights after two steps of a model with everything."""
    model = small_model(tied=True, dropout=0.3, norm=True)
    pipe = RoundPipe(model, devices=devices, model_run_config=config(grain), pin_model="off")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    inputs, labels = batch(8)
    losses = []
    for _ in range(2):
        losses.append(pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss))
        pipe.step(optimizer.step)
    return [*losses, *state(model), *(p.detach().clone() for p in model.parameters())]


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
    """Of any shape; a transposed tensor, which has no flat view, is one piece."""
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


# -- on an accelerator; tests/accelerator runs them on one made of the CPU ---------------------------------------------


class TestOnAnAccelerator:
    pytestmark = gpu

    def test_gradients_are_those_of_the_host(self):
        """Losses and gradients on the accelerator are those of virtual devices, but for the rounding of its kernels."""
        found = []
        for devices in (None, "virtual:2"):
            model, (inputs, labels) = small_model(tied=True), batch(8)
            pipe = RoundPipe(model, devices=devices, model_run_config=RoundPipeRunConfig(loss_reduction="mean"))
            for _ in range(5):
                loss = pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
            found.append((loss, gradients(model)))
            pipe.close()
        assert relative_error(found[0][0], found[1][0]) < 1e-4
        assert all(relative_error(found[0][1][name], gradient) < 1e-4 for name, gradient in found[1][1].items())

    def test_inputs_and_labels_may_live_on_the_accelerator(self):
        """What the caller computed there is waited for, and its gradient is where it is."""
        here = torch.accelerator.current_accelerator()
        model, (inputs, labels) = small_model(), batch(8)
        pipe = RoundPipe(model, devices=None, model_run_config=RoundPipeRunConfig(loss_reduction="mean"))
        plain, there = inputs.clone().requires_grad_(), inputs.to(here).requires_grad_()
        F.mse_loss(small_model()(plain * 2), labels).backward()
        pipe.forward_backward((there * 2,), label=labels.to(here), loss_fn=F.mse_loss)
        assert relative_error(there.grad.cpu(), plain.grad) < 1e-4
        pipe.close()

    def test_a_sparse_gradient_comes_down(self):
        """There is no pinned memory for it, so it is waited for."""
        (device,) = parse_devices([torch.accelerator.current_accelerator()])
        host, event = device.copy_out(torch.eye(3).to_sparse().to(device.torch_device))
        assert event.done()
        assert torch.equal(host.to_dense(), torch.eye(3))

    def test_a_run_is_repeated_to_the_last_bit(self):
        """Dropout, norms and tied weights: the same seeds and the same bits, whatever overlaps."""
        (device,) = parse_devices([torch.accelerator.current_accelerator()])
        assert same_bits(train([device]), train([device]))

    def test_a_model_four_times_larger_than_a_limit_stays_under_it(self):
        """The peak of the device's memory, with a plan for a device that is given as small."""
        (device,) = parse_devices([torch.accelerator.current_accelerator()])
        model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(64)])
        size = sum(p.numel() * p.element_size() for p in model.parameters())

        class Small(AcceleratorDevice):
            memory = size // 4

        pipe = RoundPipe(
            model, devices=[Small(device.torch_device)], model_run_config=RoundPipeRunConfig(loss_reduction="mean")
        )
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        for _ in range(3):
            pipe.forward_backward((torch.randn(64, 1024),), loss_fn=lambda outputs, _: outputs.square().mean())
        assert torch.accelerator.max_memory_allocated() - before < size // 4
        pipe.close()
