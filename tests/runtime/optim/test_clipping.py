"""Clipping and steps of parameters whose gradients are in their copies are refused; others are torch's own."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from roundpipe_runtime import ConfigError, RoundPipe, RoundPipeRunConfig

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


@pytest.mark.parametrize("clip", [clip_grad_norm_, torch.nn.utils.clip_grad_value_])
@pytest.mark.parametrize("of", ["pipe", "model", "list"])
def test_clipping_parameters_without_gradients_is_refused(trained, clip, of):
    """By the pipeline's parameters, the model's, or a list of them: the error names those to clip."""
    _, model, pipe = trained
    given = {"pipe": pipe.parameters(), "model": model.parameters(), "list": list(model.parameters())}[of]
    clip = torch.nn.utils.clip_grad_value_ if clip is not clip_grad_norm_ else clip
    with pytest.raises(ConfigError, match=r"clip_grad_norm_\(model\.optim_parameters\(\)"):
        clip(given, 1.0)


def test_the_copies_are_clipped_as_ever(trained):
    """What the error says to clip has the norm of the plain model's gradient, within its precision."""
    plain, _, pipe = trained
    expected = clip_grad_norm_(plain.parameters(), 0.01)
    assert clip_grad_norm_(pipe.optim_parameters(), 0.01).item() == pytest.approx(expected.item(), rel=0.05)
    found = torch.stack([parameter.grad.norm() for parameter in pipe.optim_parameters()]).norm()
    assert found.item() == pytest.approx(0.01, rel=1e-3)


def test_other_models_are_clipped_as_ever(trained):
    """A model without a pipeline, with gradients and without, and one tensor alone."""
    plain, _, _ = trained
    assert clip_grad_norm_(plain.parameters(), 1e9).item() > 0
    clip_grad_value_(plain.parameters(), 1e-3)
    assert max(parameter.grad.abs().max() for parameter in plain.parameters()) <= 1e-3
    assert clip_grad_norm_(nn.Parameter(torch.ones(2)), 1.0).item() == 0.0


@pytest.mark.parametrize("caller", ["script", "step"])
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
    with pytest.raises(ConfigError, match=r"SGD holds 4 parameters .*\n.*SGD\(model\.optim_parameters\(\)"):
        optimizer.step() if caller == "script" else pipe.step(optimizer.step)
    pipe.synchronize()  # after which the parameters have gradients themselves
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_before_a_backward_there_is_nothing_to_refuse():
    """No copy has a gradient yet, and none of them is lost."""
    pipe = RoundPipe(nn.Sequential(nn.Linear(4, 3)).bfloat16(), torch.float32, devices="virtual:2")
    assert clip_grad_norm_(pipe.parameters(), 1.0).item() == 0.0
    pipe.close()
