"""Layers whose parameters are parametrized by `torch.nn.utils`: for good, or in each forward and taken away again."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig, StageError
from tests.runtime.small import near

WIDTH = 6
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)


class Sum(nn.Module):
    """What is added to a parameter."""

    def __init__(self, added):
        super().__init__()
        self.added = added

    def forward(self, weight):
        return weight + self.added


class Adapted(nn.Module):
    """A linear layer with a matrix of rank 2 beside it, which stands in its weight while the layer runs."""

    def __init__(self, *, keeps_sum=False):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))
        self.keeps_sum = keeps_sum

    def forward(self, x):
        parametrize.register_parametrization(self.linear, "weight", Sum(self.b @ self.a))
        self.linear.parametrizations.weight.original.requires_grad_(False)
        try:
            with parametrize.cached():
                return torch.tanh(self.linear(x))
        finally:
            parametrize.remove_parametrizations(self.linear, "weight", leave_parametrized=self.keeps_sum)


class Normed(nn.Module):
    """A layer with a parametrization that stays, and is read twice."""

    def __init__(self):
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return torch.tanh(self.linear(torch.tanh(self.linear(x))))


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("around", [contextlib.nullcontext, parametrize.cached])
@pytest.mark.parametrize("kind", [Adapted, Normed])
def test_gradients_are_those_of_the_plain_model(kind, around, grain):
    """In three steps of three microbatches; also in `cached()`, which holds in all threads."""
    torch.manual_seed(0)
    model = nn.Sequential(*[kind() for _ in range(4)])
    plain = copy.deepcopy(model)
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3, recompute_grain=grain)
    pipe = RoundPipe(model, devices="virtual:2:check", model_run_config=config)
    for _ in range(3):
        (plain(x) - y).square().mean().backward()
        with around():
            pipe.forward_backward((x,), label=y, loss_fn=nn.functional.mse_loss)
            (pipe(x) - y).square().mean().backward()
        (plain(x) - y).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.requires_grad == other.requires_grad
        assert one.grad is other.grad is None or near(one.grad, other.grad)


def test_a_sum_that_is_left_in_the_parameter_is_a_write():
    """What a layer leaves in a copy of its parameter would be lost."""
    pipe = RoundPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Adapted(keeps_sum=True)), devices="virtual:2")
    with pytest.raises(StageError, match=r"writes Linear\.weight in its forward"):
        pipe.forward_backward((torch.randn(4, WIDTH),), label=torch.randn(4, WIDTH), loss_fn=nn.functional.mse_loss)
