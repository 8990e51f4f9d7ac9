"""A device that is lost in a step ends that step everywhere, changes nothing, and does not have to come back."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
from tests.accelerator import late
from tests.accelerator.training import late_devices
from tests.runtime.small import batch, gradients, same_bits, small_model

F = nn.functional
CONFIG = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)


def training(devices):
    model = small_model(norm=True)
    return model, RoundPipe(model, devices=devices, model_run_config=CONFIG)


def step(pipe):
    inputs, labels = batch(8)
    pipe.zero_grad()
    return pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)


@pytest.fixture
def expected():
    """Loss and gradients on one device that is there all the time."""
    late.set_order("late")
    model, pipe = training(late_devices(1))
    loss = step(pipe)
    pipe.close()
    return [loss, *gradients(model).values()]


def fails(pipe, model):
    """The step ends with an error that names the device; gradients and buffers are as they were."""
    pipe.zero_grad()
    before = [buffer.clone() for buffer in model.buffers()]
    with pytest.raises(RuntimeError, match="late:1 is lost") as caught:
        step(pipe)
    assert any("late:1" in note for note in caught.value.__notes__)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert same_bits(before, list(model.buffers()))


@pytest.mark.parametrize("order", [("late", 0), ("random", 1), ("random", 2)], ids=str)
@pytest.mark.parametrize("after", [0, 1, 20, 60])
def test_the_same_pipeline_goes_on_when_the_device_is_back(after, order, expected):
    late.set_order(*order)
    model, pipe = training(late_devices(2))
    late.lose(1, after)
    try:
        fails(pipe, model)
    finally:
        late.start_again(1)
    assert same_bits([step(pipe), *gradients(model).values()], expected)
    pipe.close()


@pytest.mark.parametrize("after", [0, 20])
def test_another_pipeline_goes_on_without_the_device(after, expected):
    late.set_order("late")
    model, pipe = training(late_devices(2))
    late.lose(1, after)
    try:
        fails(pipe, model)
        pipe.close()
        left = RoundPipe(model, devices=late_devices(1), model_run_config=CONFIG)
        assert same_bits([step(left), *gradients(model).values()], expected)
        left.close()
    finally:
        late.start_again(1)


def test_a_step_in_the_background_survives(expected):
    late.set_order("late")
    model, pipe = training(late_devices(2))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    step(pipe)
    weights = [parameter.detach() - 0.1 * parameter.grad for parameter in model.parameters()]
    pipe.step(optimizer.step, is_async=True)
    late.lose(1, 20)
    try:
        with pytest.raises(RuntimeError, match="late:1 is lost"):
            step(pipe)
    finally:
        late.start_again(1)
    pipe.synchronize()
    assert all(torch.allclose(one, other) for one, other in zip(model.parameters(), weights, strict=True))
    pipe.close()
