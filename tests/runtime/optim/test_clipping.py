"""Clipped gradients, scaled losses, moments in eight bits."""

import copy
import importlib.util

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from roundpipe_runtime import ConfigError, GradScaler, RoundPipe, RoundPipeRunConfig
from tests import fresh_process
from tests.runtime.small import batch, relative_error, small_model

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean")
INPUTS, LABELS = torch.randn(6, 4, generator=torch.Generator().manual_seed(2)), torch.zeros(6, 3)


@pytest.fixture
def trained():
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16()
    model = copy.deepcopy(plain)
    pipe = RoundPipe(model, torch.float32, devices="virtual:2", model_run_config=MEAN)
    inputs, labels = INPUTS.bfloat16(), LABELS.bfloat16()
    F.mse_loss(plain(inputs), labels).backward()
    pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
    yield plain, model, pipe
    pipe.close()


def parameters_of(of, model, pipe):
    return {"pipe": pipe.parameters(), "model": model.parameters(), "copies": pipe.optim_parameters()}[of]


@pytest.mark.parametrize("of", ["pipe", "model", "copies"])
@pytest.mark.parametrize(
    "norm",
    [
        lambda given: clip_grad_norm_(given, 1e9),
        lambda given: get_total_norm([one.grad for one in given if one.grad is not None]),
        lambda given: sum(one.grad.float().norm() ** 2 for one in given if one.grad is not None) ** 0.5,
        lambda given: torch.cat([one.grad.flatten() for one in given]).norm(),
    ],
)
def test_loops_over_the_parameters_of_the_model_read_its_gradients(trained, norm, of):
    """They were in the copies alone: a norm of 0, without an error."""
    plain, model, pipe = trained
    expected = float(norm(plain.parameters()))
    assert float(norm(parameters_of(of, model, pipe))) == pytest.approx(expected, rel=0.02)


def halve(given):
    for one in given:
        one.grad = one.grad * 0.5


def add_penalty(given):
    sum((one * one).sum() for one in given).backward()


def clear(given):
    for one in given:
        one.grad = None


CHANGES = {
    "norm": lambda given: clip_grad_norm_(given, 0.01),
    "value": lambda given: clip_grad_value_(given, 1e-3),
    "by a norm": lambda given: clip_grads_with_norm_(given, 0.01, torch.tensor(2.0)),
    "in place": lambda given: [one.grad.mul_(0.5) for one in given],
    "another": halve,
    "a backward": add_penalty,
    "none": clear,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("caller", ["script", "step", "exact", "a run", "disk"])
def test_what_a_loop_makes_of_the_gradients_of_the_model_is_stepped(change, caller, tmp_path):
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    model = copy.deepcopy(plain)
    host = f"disk:{tmp_path}" if caller == "disk" else "memory"
    pipe = RoundPipe(model, torch.float64, devices="virtual:2", model_run_config=MEAN, host=host)
    wanted, found = torch.optim.SGD(plain.parameters(), 0.5), torch.optim.SGD(pipe.optim_parameters(), 0.5)
    for _ in range(2):
        for _ in range(2 if caller == "a run" else 1):
            F.mse_loss(plain(INPUTS), LABELS).backward()
            CHANGES[change](list(plain.parameters()))
            pipe.forward_backward((INPUTS,), label=LABELS, loss_fn=F.mse_loss)
            CHANGES[change](list(model.parameters()))
        wanted.step()
        wanted.zero_grad()
        if caller in ("script", "a run", "disk"):
            found.step()
            found.zero_grad()
        else:
            pipe.step(lambda: (found.step(), found.zero_grad()), is_async="exact" if caller == "exact" else False)
    pipe.synchronize()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other, one)
    assert all(one.grad is None for one in model.parameters())


@pytest.mark.parametrize("is_async", [True, "exact"])
def test_a_step_in_the_background_frees_gradients_as_it_goes(is_async):
    """Those of the model's parameters are in the same memory, and would keep it."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).bfloat16()
    pipe = RoundPipe(model, torch.float32, devices="virtual:2", model_run_config=MEAN)
    optimizer = torch.optim.SGD(pipe.optim_parameters(), 0.5)
    pipe.forward_backward((INPUTS.bfloat16(),), label=LABELS.bfloat16(), loss_fn=F.mse_loss)
    for shown, own in zip(model.parameters(), pipe.optim_parameters(), strict=True):
        assert (shown.grad.data_ptr(), shown.grad.dtype) == (own.grad.data_ptr(), torch.float32)
    pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
    assert all(one.grad is None for one in model.parameters())
    pipe.synchronize()


def test_pipelines_that_share_layers_keep_their_gradients_apart():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    pipes = [RoundPipe(model, torch.float64, devices="virtual:2", model_run_config=MEAN) for _ in range(2)]
    for weight, pipe in zip((1, 3), pipes, strict=True):
        pipe.forward_backward((INPUTS * weight,), label=LABELS, loss_fn=F.mse_loss)
    for weight, pipe in zip((1, 3), pipes, strict=True):
        plain = copy.deepcopy(model)
        for one in plain.parameters():
            one.grad = None
        pipe.forward_backward((INPUTS * weight,), label=LABELS, loss_fn=F.mse_loss)
        (2 * F.mse_loss(plain(INPUTS * weight), LABELS)).backward()
        for one, other in zip(plain.parameters(), pipe.optim_parameters(), strict=True):
            torch.testing.assert_close(other.grad.float(), one.grad)


def test_other_models_are_clipped_as_ever(trained):
    plain, _, _ = trained
    assert clip_grad_norm_(plain.parameters(), 1e9).item() > 0
    clip_grad_value_(plain.parameters(), 1e-3)
    assert max(parameter.grad.abs().max() for parameter in plain.parameters()) <= 1e-3
    assert clip_grad_norm_(nn.Parameter(torch.ones(2)), 1.0).item() == 0.0
    before_a_backward = RoundPipe(nn.Sequential(nn.Linear(4, 3)).bfloat16(), torch.float32, devices="virtual:2")
    assert clip_grad_norm_(before_a_backward.parameters(), 1.0).item() == 0.0


@pytest.mark.parametrize("caller", ["script", False, True, "exact"])
@pytest.mark.parametrize("groups", ["one", "each", "with another model"])
def test_an_optimizer_of_parameters_without_gradients_is_refused(trained, caller, groups):
    """Whoever calls its step, whatever its groups are: it would change nothing."""
    plain, model, pipe = trained
    given = list(model.parameters())
    if groups == "each":
        given = [{"params": [parameter], "lr": 0.1 + number} for number, parameter in enumerate(given)]
    if groups == "with another model":
        given += plain.parameters()
    optimizer = torch.optim.SGD(given, lr=0.1)

    def step():
        if caller == "script":
            optimizer.step()
        else:
            pipe.step(optimizer.step, is_async=caller)
            pipe.synchronize()

    with pytest.raises(ConfigError, match=r"SGD has 4 parameters .*\n.*SGD\(model\.optim_parameters\(\)"):
        step()
    pipe.synchronize()  # after which the parameters have gradients themselves
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


@pytest.fixture
def pipe():
    return RoundPipe(small_model(), torch.float64, devices="virtual:2:check", model_run_config=MEAN)


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


def test_a_scaler_s_state_is_saved_and_loaded_and_switched_off_it_changes_nothing():
    scaler = GradScaler(init_scale=8.0, growth_factor=4.0, growth_interval=3)
    scaler.set_backoff_factor(0.25)
    other = GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert other.get_scale() == 8
    assert other.get_growth_factor(up_to_date=True) == 4
    assert other.get_backoff_factor() == 0.25
    assert other.get_growth_interval() == 3
    off, parameter = GradScaler(enabled=False), nn.Parameter(torch.ones(1))
    loss = off.scale(parameter.sum())
    loss.backward()
    off.step(torch.optim.SGD([parameter], lr=1.0))
    off.update()
    assert (loss.item(), parameter.item(), off.get_scale()) == (1.0, 0.0, 1.0)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_moments_in_8_bits_have_the_bits_of_a_synchronous_step_also_when_resumed(tmp_path):
    """A hidden step, and a checkpoint of it, are those of a training without either."""
    done = fresh_process.run("-m", "tests.runtime.optim.eight_bits", str(tmp_path / "saved"), timeout=300)
    assert done.returncode == 0, done.stderr
