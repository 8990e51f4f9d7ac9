"""RoundPipe(gradient_dtype=...): gradients of master weights in fewer bits between a run and the step."""

import contextlib
import pickle

import pytest
import torch
from torch import nn

from roundpipe_runtime import ConfigError, OptimizerCtx, RoundPipe, RoundPipeRunConfig
from tests.runtime.optim.test_parts import Clips
from tests.runtime.small import batch, relative_error, same_bits, small_model

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)
HALF = {"optim_dtype": torch.float32, "gradient_dtype": torch.bfloat16}


OPTIMIZERS = {
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "one that clips": lambda params: Clips(params, lr=0.1),
}


def half_model():
    return small_model().bfloat16()


def run(pipe):
    inputs, labels = batch(6)
    return pipe.forward_backward(
        (inputs.bfloat16(),), label=labels, loss_fn=lambda outputs, targets: F.mse_loss(outputs.float(), targets)
    )


def rounded(steps, make, wrap, **options):
    """The same training with gradients in float32 that are rounded by hand before each step."""
    pipe = wrap(half_model(), torch.float32, model_run_config=MEAN, name="same", **options)
    optimizer = make(list(pipe.optim_parameters()))
    for _ in range(steps):
        run(pipe)
        for parameter in pipe.optim_parameters():
            parameter.grad.copy_(parameter.grad.bfloat16())
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    return [p.detach().clone() for p in pipe.optim_parameters()]


@pytest.mark.parametrize("how", [False, True, "exact", "outside", "groups"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_reads_the_rounded_sum(wrap, name, how):
    """Each master weight is that of a training whose sums in float32 are rounded once, whichever way the step runs."""
    make = OPTIMIZERS[name]
    groups, how = ({"replicas": 2}, False) if how == "groups" else ({}, how)
    pipe = wrap(half_model(), **HALF, model_run_config=MEAN, name="same", **groups)
    with OptimizerCtx():
        optimizer = make(list(pipe.parameters()))
    steps = 1 if how is True else 4  # weights one step old lead elsewhere
    word = contextlib.nullcontext()
    if how == "exact" and name == "one that clips":
        word = pytest.warns(UserWarning, match="Clips does not update one parameter after the other")
    with word:
        take_steps(pipe, optimizer, steps, how)
    pipe.synchronize()
    assert same_bits([p.detach() for p in pipe.optim_parameters()], rounded(steps, make, wrap, **groups))


def take_steps(pipe, optimizer, steps, how):
    for _ in range(steps):
        run(pipe)
        assert {p.grad.dtype for p in pipe.optim_parameters()} == {torch.bfloat16}
        if how == "outside":
            optimizer.step()
            optimizer.zero_grad()
        else:
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), how)


def test_gradients_of_several_runs_add_up(wrap):
    """Near twice the gradient of one run, as far as bfloat16 goes."""
    pipe = wrap(half_model(), **HALF, model_run_config=MEAN)
    run(pipe)
    once = [p.grad.clone() for p in pipe.optim_parameters()]
    run(pipe)
    for parameter, gradient in zip(pipe.optim_parameters(), once, strict=True):
        assert parameter.grad.dtype == torch.bfloat16
        assert relative_error(parameter.grad, 2 * gradient) < 1e-2


def test_frozen_parameters_hooks_and_pickles_keep_the_dtype(wrap):
    pipe = wrap(half_model(), **HALF, model_run_config=MEAN)
    pipe.model[0].requires_grad_(False)
    names = dict(pipe.optim_named_parameters())
    seen = []
    names["2.weight"].register_hook(lambda gradient: seen.append(gradient.dtype))
    run(pipe)
    assert names["0.weight"].grad is None
    pipe.model[0].requires_grad_(True)
    run(pipe)
    again = pickle.loads(pickle.dumps(RoundPipe(pipe.model, **HALF, devices="virtual:1", model_run_config=MEAN)))
    run(again)
    for found in (pipe, again):
        assert {p.grad.dtype for p in found.optim_parameters()} == {torch.bfloat16}
    assert seen == [torch.bfloat16] * 2


def test_parameters_that_hold_their_own_gradient_are_as_they_were(wrap):
    """A model of float32 has no copies."""
    pipe = wrap(small_model(), **HALF, model_run_config=MEAN)
    inputs, labels = batch(6)
    pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
    assert {p.grad.dtype for p in pipe.parameters()} == {torch.float32}


def test_a_closure_is_refused_with_the_line_to_type(wrap):
    pipe = wrap(half_model(), **HALF, model_run_config=MEAN)
    optimizer = torch.optim.LBFGS(pipe.optim_parameters())
    with pytest.raises(ConfigError, match="LBFGS was given a closure"):
        pipe.step(lambda: optimizer.step(lambda: run(pipe)))


@pytest.mark.parametrize("options", [{"gradient_dtype": torch.bfloat16}, {**HALF, "gradient_dtype": "bfloat16"}])
def test_a_dtype_that_has_no_meaning_is_refused(options):
    with pytest.raises(ConfigError, match="gradient_dtype, the dtype of gradients of master weights"):
        RoundPipe(small_model(), **options)
