"""What stays on a device, and for how long."""

import gc
import weakref

import pytest
import torch
from torch import nn

from roundpipe_runtime import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, Timeline, VirtualDevice
from tests.runtime.small import allocated, batch, gradients, near, relative_error, small_model

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)


def test_a_run_leaves_no_activation_behind(wrap):
    model, (inputs, labels) = small_model(norm=True, dropout=0.2), batch(9)
    alive = []
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
    pipe = wrap(model)
    gc.collect()
    gc.disable()
    try:
        pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
        F.mse_loss(pipe(inputs, roundpipe_run_config=MEAN), labels).backward()
        pipe(inputs, roundpipe_run_config=MEAN)  # and never backward
        for device in pipe.devices:
            device.worker.submit(int).result()  # its last stage has left, too
        assert len(alive) > 60
        assert not [reference for reference in alive if reference() is not None]
        assert sum(allocated(device) for device in pipe.devices) == 0
    finally:
        gc.enable()


def test_a_model_four_times_larger_than_its_devices_trains():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(32)])
    inputs = torch.randn(6, 32)
    expected = model(inputs).square().mean()
    expected.backward()
    exact = gradients(model)
    model.zero_grad()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    small = [VirtualDevice(f"virtual:{n}", check=True, memory_limit=size // 4) for n in range(2)]
    pipe = RoundPipe(model, devices=small, model_run_config=MEAN)
    loss = pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().mean())
    assert near(loss, expected.detach())
    assert all(relative_error(p.grad, exact[name]) < 1e-5 for name, p in model.named_parameters())


@pytest.mark.parametrize(("room", "uploads"), [(None, 1), (40, 1), (2, 2)])
def test_what_fits_stays_between_forward_and_backward(room, uploads):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    device = VirtualDevice("virtual:0", check=True, memory_limit=room and room * size)
    inputs = torch.randn(6, 16)
    model(inputs).square().mean().backward()
    exact = gradients(model)
    model.zero_grad()
    plan = ModelExecutePlan([range(4), range(4, 6)], [range(6, 8), range(3, 6), range(3)])
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3, execute_plan=plan)
    pipe = RoundPipe(model, devices=[device], model_run_config=config)
    with Timeline() as timeline:
        pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().mean())
    found = [record.layer for record in timeline.records if record.kind == "upload"]
    assert [found.count(layer) for layer in range(8)] == [uploads] * 6 + [1, 1]
    assert all(near(p.grad, exact[name]) for name, p in model.named_parameters())
    assert device.allocated == 0
