"""The gradient scaler: scales in the loss, unscales in the step, skips infinities, and is saved with the rest."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import GradScaler, RoundPipe, RoundPipeRunConfig
from tests.runtime.small import batch, relative_error, small_model

F = nn.functional


@pytest.fixture
def pipe():
    return RoundPipe(
        small_model(),
        torch.float64,
        devices="virtual:2:check",
        model_run_config=RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3),
    )


@pytest.mark.parametrize("is_async", [False, True])
def test_scaled_training_is_unscaled_training(pipe, is_async):
    scaler = GradScaler(init_scale=1024.0, growth_interval=1)
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
    inputs, labels = batch(6)
    loss = pipe.forward_backward((inputs,), label=labels, loss_fn=lambda o, t: scaler.scale(F.mse_loss(o, t)))
    pipe.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()), is_async)
    scaler.update(is_async=is_async)
    assert scaler.get_scale() == 2048.0  # there when update returns, either way
    pipe.synchronize()
    exact = small_model().double()
    expected = F.mse_loss(exact(inputs.double()), labels.double())
    expected.backward()
    assert relative_error(loss / 1024, expected.detach()) < 1e-6
    for own, plain in zip(pipe.parameters(), exact.parameters(), strict=True):
        assert relative_error(own.detach(), (plain - 0.1 * plain.grad).detach()) < 1e-6
    assert scaler.get_scale() == 2048


def test_a_step_with_infinities_is_skipped(pipe):
    scaler = GradScaler(init_scale=1024.0)
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
    before = [p.detach().clone() for p in pipe.parameters()]
    inputs, labels = batch(6)
    pipe.forward_backward(
        (inputs,), label=labels, loss_fn=lambda o, t: scaler.scale(F.mse_loss(o, t)) * torch.tensor(float("inf"))
    )
    pipe.step(lambda: scaler.step(optimizer))
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(pipe.parameters(), before, strict=True))
    assert scaler.get_scale() == 512


def test_its_state_is_saved_and_loaded():
    scaler = GradScaler(init_scale=8.0, growth_factor=4.0, growth_interval=3)
    scaler.set_backoff_factor(0.25)
    other = GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert other.get_scale() == 8
    assert other.get_growth_factor(up_to_date=True) == 4
    assert other.get_backoff_factor() == 0.25
    assert other.get_growth_interval() == 3


def test_switched_off_it_changes_nothing():
    scaler = GradScaler(enabled=False)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    loss = scaler.scale(parameter.sum())
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert (loss.item(), parameter.item(), scaler.get_scale()) == (1.0, 0.0, 1.0)
