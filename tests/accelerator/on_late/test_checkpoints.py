"""Checkpoints inside layers that draw on the host: each device goes back in a thread of autograd's of its own."""

import time

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
from tests.accelerator import late
from tests.accelerator.training import late_devices, moved_by_runs
from tests.runtime.small import same_bits

CONFIG = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=4)


class Scaled(nn.Module):
    """Draws a number of the CPU's generator in a part that is called again, and leaves others time to draw before."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def part(self, x):
        time.sleep(0.002)
        return self.linear(x) * torch.rand(()).item()

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False)


def gradients(count):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *[Scaled() for _ in range(6)])
    pipe = RoundPipe(model, devices=late_devices(count), model_run_config=CONFIG)
    with moved_by_runs(2):
        for _ in range(2):
            pipe.forward_backward((torch.ones(8, 8),), loss_fn=lambda outputs, _: outputs.square().mean())
    pipe.close()
    return [parameter.grad for parameter in model.parameters()]


def test_what_a_checkpoint_draws_is_the_same_on_any_number_of_devices():
    late.set_order("late")
    expected = gradients(1)
    for _ in range(3):
        assert same_bits(gradients(3), expected)
