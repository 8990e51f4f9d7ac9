"""Layers that draw, on the device or on the host, draw the same on any number of devices, and disturb nobody."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
from tests.accelerator import late
from tests.accelerator.training import late_devices, moved_by_runs
from tests.runtime.small import same_bits

CONFIG = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=4)


class Noisy(nn.Module):
    """Draws on the device, and where the probability says so on the host."""

    def __init__(self, *, on_host: bool, checkpoints: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3))
        self.on_host, self.checkpoints = on_host, checkpoints

    def part(self, x):
        x = x + self.inner(x)
        return x * torch.rand(()).item() if self.on_host else x

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False) if self.checkpoints else self.part(x)


def gradients(count, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*[Noisy(**options) for _ in range(6)])
    pipe = RoundPipe(model, devices=late_devices(count), model_run_config=CONFIG)
    with moved_by_runs(1):
        loss = pipe.forward_backward((torch.ones(8, 4),), loss_fn=lambda outputs, _: outputs.square().mean())
    pipe.close()
    return [loss, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("order", [("late", 0), ("random", 1)], ids=str)
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("on_host", [False, True])
def test_the_same_on_any_number_of_devices(on_host, checkpoints, order):
    late.set_order(*order)
    expected = gradients(1, on_host=on_host, checkpoints=checkpoints)
    for count in (2, 3):
        assert same_bits(gradients(count, on_host=on_host, checkpoints=checkpoints), expected)


def test_a_module_that_hands_out_no_generators_is_asked_for_their_states(monkeypatch):
    late.set_order("late")
    expected = gradients(2, on_host=True, checkpoints=False)
    monkeypatch.delattr(torch.late, "default_generators")
    assert same_bits(gradients(2, on_host=True, checkpoints=False), expected)
