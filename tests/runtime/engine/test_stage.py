"""A stage on its device: what a loss learns beside the layers, and layers that call parts of themselves again."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundpipe_runtime import RoundPipeRunConfig, StageError, WeightedLoss
from tests.runtime.small import batch, near, small_model

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)


class Criterion(nn.Module):
    """A loss with a temperature that it learns, and a penalty on a weight of the model."""

    def __init__(self, weight, *, pair):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.penalised = [weight]
        self.pair = pair

    def forward(self, outputs, labels):
        squares = (self.temperature * outputs - labels).square()
        penalty = self.penalised[0].square().sum()
        if self.pair:
            return WeightedLoss(squares.sum() + penalty * outputs.numel(), outputs.numel())
        return squares.mean() + penalty


@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_loss_learns_with_the_model(wrap, pair, dtype):
    """Its own parameters, and those of the model that it reads, get the gradient of the whole batch."""
    model = small_model()
    plain = copy.deepcopy(model)
    inputs, labels = batch(10)
    criterion, expected = Criterion(model[0].weight, pair=pair), Criterion(plain[0].weight, pair=False)
    expected(plain(inputs), labels).backward()
    pipe = wrap(model, dtype, model_run_config=MEAN)
    pipe.forward_backward((inputs,), label=labels, loss_fn=criterion)
    assert near(criterion.temperature.grad, expected.temperature.grad)
    for found, parameter in zip(pipe.optim_parameters(), plain.parameters(), strict=True):
        assert near(found.grad, parameter.grad)


def test_a_loss_that_fails_has_learned_nothing(wrap):
    """Gradients of its parameters are given to them with those of the layers, when all has succeeded."""
    model = small_model()
    criterion = Criterion(model[0].weight, pair=False)
    calls = []

    def loss_fn(outputs, labels):
        calls.append(None)
        if len(calls) == 3:
            raise ValueError("the third one")
        return criterion(outputs, labels)

    inputs, labels = batch(6)
    with pytest.raises(ValueError, match="the third one"):
        wrap(model).forward_backward((inputs,), label=labels, loss_fn=loss_fn, run_config=MEAN)
    assert criterion.temperature.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_tensor_that_a_layer_kept_is_no_part_of_the_loss(wrap):
    """Its gradient would have been lost; the error names the layer and says to return the tensor."""

    class Keeps(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            self.auxiliary = output.square().mean()
            return output

    model = nn.Sequential(Keeps(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    inputs, labels = batch(6)
    with pytest.raises(StageError, match=r"that layer 0 \(Keeps\) kept on itself.*\n.*return outputs, auxiliary_loss"):
        wrap(model).forward_backward(
            (inputs,), label=labels, loss_fn=lambda o, y: F.mse_loss(o, y) + model[0].auxiliary, run_config=MEAN
        )


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_with_a_checkpoint_inside(wrap, reentrant):
    """The part that is called again in the backward is computed with the device's weights: the gradients are exact."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=reentrant)

    model = nn.Sequential(nn.Linear(4, 4), Checkpointed(), nn.Linear(4, 3))
    plain = copy.deepcopy(model)
    inputs, labels = batch(10)
    F.mse_loss(plain(inputs), labels).backward()
    wrap(model).forward_backward(
        (inputs,), label=labels, loss_fn=lambda o, y: WeightedLoss((o - y).square().sum(), o.numel())
    )
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert near(found.grad, expected.grad)
