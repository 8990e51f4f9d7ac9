"""What fails on the device comes out of the call that caused it, and the next training is as if it had not been."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import (
    DeviceMemoryError,
    ModelExecutePlan,
    RoundPipe,
    RoundPipeRunConfig,
    load_checkpoint,
    save_checkpoint,
)
from tests.accelerator import late
from tests.accelerator.training import expected, late_devices, train
from tests.runtime.small import batch, same_bits, small_model

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
    limit = torch.accelerator.get_memory_info(0)[1]
    torch.accelerator.empty_cache()
    for number in range(2):
        late.set_memory(number, 200_000)
    try:
        with pytest.raises(DeviceMemoryError, match=r"late:\d is out of memory"):
            loss()
        assert all(parameter.grad is None for parameter in model.parameters())
    finally:
        for number in range(2):
            late.set_memory(number, limit)
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


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_resumed_training_is_the_same_to_the_last_bit(order, tmp_path):
    late.set_order(*order)
    inputs, labels = batch(8)

    def start(devices):
        model = small_model(tied=True, dropout=0.3, norm=True)
        pipe = RoundPipe(model, devices=late_devices(devices), model_run_config=CONFIG)
        return model, pipe, torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)

    def steps(pipe, optimizer):
        for _ in range(2):
            pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))

    model, pipe, optimizer = start(2)
    steps(pipe, optimizer)
    save_checkpoint(tmp_path, pipe, optimizer=optimizer)
    steps(pipe, optimizer)
    pipe.close()
    resumed, pipe, optimizer = start(3)
    torch.manual_seed(123)
    load_checkpoint(tmp_path, pipe, optimizer=optimizer)
    steps(pipe, optimizer)
    pipe.close()
    assert same_bits([*model.parameters(), *model.buffers()], [*resumed.parameters(), *resumed.buffers()])
