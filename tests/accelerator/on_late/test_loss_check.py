"""The first run checks a loss function, after the device has computed its inputs, and changes no other generator."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import LossError, ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from tests.accelerator import late
from tests.accelerator.training import late_devices
from tests.runtime.small import batch, gradients, near, same_bits, small_model

F = nn.functional
ORDERS = [("late", 0), *(("random", seed) for seed in range(3))]


def config(copies):
    plan = ModelExecutePlan([range(3), range(3, 5)], [range(5, 7), range(3, 5), range(3)])
    plan.last_stage_copies = copies
    return RoundPipeRunConfig(loss_reduction="mean", num_microbatch=6, execute_plan=plan)


def states():
    """Those of the generators of the CPU and of two devices."""
    return [torch.get_rng_state(), *(torch.late.get_rng_state(number) for number in range(2))]


def contrastive(outputs, labels):
    """Compares rows with each other."""
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs), device=outputs.device))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("count", "copies"), [(1, 1), (2, 2), (3, 3)])
def test_rows_of_several_devices_are_compared(count, copies, order):
    """Each microbatch has one row, so the three rows that are compared come from all copies of the last stage."""
    late.set_order(*order)
    inputs, labels = batch(6)
    plain, model = small_model(), small_model()
    F.mse_loss(plain(inputs), labels).backward()
    pipe = RoundPipe(model, devices=late_devices(count), model_run_config=config(copies))
    with pytest.raises(LossError, match='loss_reduction="joined"'):
        pipe.forward_backward((inputs,), label=labels, loss_fn=contrastive)
    pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
    found = gradients(model)
    assert all(near(found[name], gradient) for name, gradient in gradients(plain).items())
    pipe.close()


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_generators_of_devices_are_left_alone(order):
    """A run that draws nothing moves no generator, and masks are the same if the loss was checked before."""
    late.set_order(*order)
    inputs, labels = batch(6)
    for dropout in (0.0, 0.4):
        found = []
        for is_checked in (True, False):
            model = small_model(dropout=dropout)
            fields = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=6)
            pipe = RoundPipe(model, devices=late_devices(2), model_run_config=fields)
            if not is_checked:  # but before
                pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
                pipe.zero_grad()
            torch.manual_seed(3)
            before = states()
            loss = pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
            pipe.close()
            assert same_bits(before[1:], states()[1:])
            assert torch.equal(before[0], torch.get_rng_state()) == (not dropout)
            found.append([loss, *gradients(model).values()])
        assert same_bits(*found)
