"""Failures, lost devices and random numbers on the reference accelerator."""

import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundpipe_runtime import DeviceMemoryError, ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from tests.accelerator import late
from tests.accelerator.training import expected, late_devices, memory_of, moved_by_runs, train
from tests.runtime.small import batch, gradients, same_bits, small_model

F = nn.functional
ORDERS = [("late", 0), ("random", 1), ("random", 2)]
CONFIG = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_out_of_memory(order):
    late.set_order(*order)
    devices = late_devices(2)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(200, 200) for _ in range(8)])
    # a plan is given: one that is made for the memory that there is would refuse the model before anything runs
    plan = ModelExecutePlan([range(4)], [range(4, 8), range(4)])
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3, execute_plan=plan)
    pipe = RoundPipe(model, devices=devices, model_run_config=config)

    def loss():
        return pipe.forward_backward((torch.ones(6, 200),), loss_fn=lambda outputs, _: outputs.square().mean())

    right = loss()
    pipe.zero_grad()
    with memory_of(200_000, 200_000):
        with pytest.raises(DeviceMemoryError, match=r"late:\d is out of memory"):
            loss()
        assert all(parameter.grad is None for parameter in model.parameters())
    assert loss().equal(right)
    pipe.close()


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_kernel_that_fails(order):
    late.set_order(*order)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    pipe = RoundPipe(model, devices=late_devices(2), model_run_config=CONFIG)

    def loss(index):
        inputs = torch.arange(9) % index
        return pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().mean())

    right = loss(9)
    pipe.zero_grad()
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        pipe.forward_backward((torch.full((9,), 11),), loss_fn=lambda outputs, _: outputs.square().mean())
    pipe.zero_grad()
    assert loss(9).equal(right)
    pipe.close()
    assert same_bits(train(late_devices(2)), expected())


FOUR = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=4)


class Noisy(nn.Module):
    """Draws on the device, and where the probability says so on the host."""

    def __init__(self, *, on_host: bool, checkpoints: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3))
        self.on_host, self.checkpoints = on_host, checkpoints

    def part(self, x):
        if self.checkpoints:
            time.sleep(0.002)  # others have time to draw before
        x = x + self.inner(x)
        return x * torch.rand(()).item() if self.on_host else x

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False) if self.checkpoints else self.part(x)


def drawn_gradients(count, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*[Noisy(**options) for _ in range(6)])
    pipe = RoundPipe(model, devices=late_devices(count), model_run_config=FOUR)
    with moved_by_runs(1):
        loss = pipe.forward_backward((torch.ones(8, 4),), loss_fn=lambda outputs, _: outputs.square().mean())
    pipe.close()
    return [loss, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("order", [("late", 0), ("random", 1)], ids=str)
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("on_host", [False, True])
def test_the_same_on_any_number_of_devices(on_host, checkpoints, order):
    late.set_order(*order)
    expected = drawn_gradients(1, on_host=on_host, checkpoints=checkpoints)
    for count in (2, 3):
        assert same_bits(drawn_gradients(count, on_host=on_host, checkpoints=checkpoints), expected)


def test_a_module_that_hands_out_no_generators_is_asked_for_their_states(monkeypatch):
    late.set_order("late")
    expected = drawn_gradients(2, on_host=True, checkpoints=False)
    monkeypatch.delattr(torch.late, "default_generators")
    assert same_bits(drawn_gradients(2, on_host=True, checkpoints=False), expected)


def training(devices):
    model = small_model(norm=True)
    return model, RoundPipe(model, devices=devices, model_run_config=CONFIG)


def step(pipe):
    inputs, labels = batch(8)
    pipe.zero_grad()
    return pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)


@pytest.fixture
def weights():
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
def test_the_same_pipeline_goes_on_when_the_device_is_back(after, order, weights):
    late.set_order(*order)
    model, pipe = training(late_devices(2))
    late.lose(1, after)
    try:
        fails(pipe, model)
    finally:
        late.start_again(1)
    assert same_bits([step(pipe), *gradients(model).values()], weights)
    pipe.close()


@pytest.mark.parametrize("after", [0, 20])
def test_another_pipeline_goes_on_without_the_device(after, weights):
    late.set_order("late")
    model, pipe = training(late_devices(2))
    late.lose(1, after)
    try:
        fails(pipe, model)
        pipe.close()
        left = RoundPipe(model, devices=late_devices(1), model_run_config=CONFIG)
        assert same_bits([step(left), *gradients(model).values()], weights)
        left.close()
    finally:
        late.start_again(1)


def test_a_step_in_the_background_survives(weights):
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
