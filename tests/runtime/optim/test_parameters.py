"""Copies of parameters for the optimizer, dtypes of gradients, clipped gradients, scaled losses, moments in 8 bits."""

import contextlib
import copy
import importlib.util
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from roundpipe_runtime import ConfigError, GradScaler, OptimizerCtx, RoundPipe, optim
from roundpipe_runtime.engine import lifecycle
from roundpipe_runtime.optim.layer_contents import scan
from roundpipe_runtime.optim.parameters import ParameterStore
from tests import fresh_process
from tests.runtime.optim.test_parts import Clips
from tests.runtime.small import MEAN, batch, relative_error, same_bits, small_model

F = nn.functional


def test_a_tied_weight_is_one_parameter_of_its_layer_and_layers_that_share_a_module_share_a_lock():
    """Device copies stand in the places of a module: two layers with a module in common take turns."""
    layer = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    layer[1].weight = layer[0].weight
    shared = nn.Linear(2, 2)
    tied, first, second, third = scan(
        [layer, nn.Sequential(shared), nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.ReLU(), shared)]
    )
    assert len(tied.slots) == 2
    assert [id(p) for p in tied.parameters()] == [id(layer[0].weight)]
    assert tied.nbytes() == 36
    assert first.lock is third.lock
    assert first.lock is not second.lock
    contents = scan(list(small_model(tied=True)))
    assert contents[2].lock is not contents[3].lock  # a weight in common is no module in common


def test_gradients_are_added_in_the_order_of_the_list():
    """What was there first, then the last layer, then those before it: float32 sums in exactly that order."""
    model = nn.Linear(1, 1, bias=False)
    store = ParameterStore(model)
    numbers = [torch.full((1, 1), value) for value in (1e8, 3.0, -1e8)]
    store.add_gradients([{model.weight: number.clone()} for number in numbers])
    expected = (numbers[0] + numbers[1]) + numbers[2]
    assert torch.equal(model.weight.grad, expected)
    store.add_gradients([{model.weight: torch.ones(1, 1)}])
    assert torch.equal(model.weight.grad, expected + 1)


def test_a_master_holds_gradients_in_its_own_dtype():
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    store = ParameterStore(model, torch.float32)
    ((name, master),) = store.named()
    for _ in range(300):  # in bfloat16 the sum would stay at 256
        store.add_gradients([{model.weight: torch.ones(1, 1)}])
    assert name == "weight"
    assert master.dtype == torch.float32
    assert master.grad.item() == 300
    assert model.weight.grad.data_ptr() == master.grad.data_ptr()
    store.show_gradients()
    assert model.weight.grad.dtype == torch.bfloat16
    assert model.weight.grad.item() == 300
    store.zero_grad(set_to_none=False)
    assert (master.grad.item(), model.weight.grad.item()) == (0, 0)
    store.zero_grad()
    assert (master.grad, model.weight.grad) == (None, None)


WRITES = {
    "vector": lambda layer: nn.utils.vector_to_parameters(torch.arange(12000).bfloat16(), [layer.weight]),
    "memory": lambda layer: setattr(layer.weight, "data", torch.full_like(layer.weight, 0.25)),
    "mask": lambda layer: layer.weight.data.mul_(torch.arange(12000).reshape(300, 40) % 2),
    "row": lambda layer: layer.weight.data[17].zero_(),
    "in place": lambda layer: nn.init.constant_(layer.weight, 3),
    "state": lambda layer: layer.load_state_dict({"weight": torch.full_like(layer.weight, 4.0)}, assign=True),
}


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_wins_over_the_master(write, stepped):
    """Averages of weights, a rollback, a mask, one row of a table, a state: also where torch counts no write."""
    model = nn.Linear(40, 300, bias=False).to(torch.bfloat16)
    store = ParameterStore(model, torch.float32)
    ((_, master),) = store.named()
    optimizer = torch.optim.SGD([master], lr=0.5)
    for number in range(5):
        if stepped:
            store.add_gradients([{model.weight: torch.full((300, 40), 1.0 + number)}])
            optimizer.step()
            optimizer.zero_grad()
            store.publish()
        write(model)
        expected = model.weight.detach().clone()
        store.adopt()
        store.publish()
        assert torch.equal(model.weight, expected)
        assert torch.equal(master.detach(), expected.float())


def test_a_master_keeps_its_bits_where_the_parameter_was_not_written():
    """A parameter with other memory and the same numbers, as pinned memory has, was not written."""
    model = nn.Linear(3, 3, bias=False).to(torch.bfloat16)
    store = ParameterStore(model, torch.float32)
    ((_, master),) = store.named()
    with torch.no_grad():
        master.add_(1e-5)  # less than bfloat16 has
    store.publish()
    finer = master.detach().clone()
    assert not torch.equal(finer, model.weight.float())
    for _ in range(4):
        model.weight.data = model.weight.detach().clone()
        store.adopt()
        store.publish()
    assert torch.equal(master.detach(), finer)


def stepped():
    parameter = nn.Parameter(torch.ones(64, 16))
    optimizer = optim.Adam([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("rows", [70, 60])
@pytest.mark.parametrize("when", ["before the gradient", "after the gradient"])
def test_a_parameter_that_was_resized_is_refused(when, rows):
    """As `resize_token_embeddings` resizes: the parameter stays, with other data."""
    parameter, optimizer = stepped()
    if when == "after the gradient":
        parameter.data = torch.ones(rows, 16)
    else:
        parameter.grad = None
        parameter.data = torch.ones(rows, 16)
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(
        ConfigError, match=rf"resized to \({rows}, 16\).* moments \(64, 16\)\. Create the optimizer again"
    ):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(rows, 16))
    parameter.grad = torch.ones_like(parameter)
    plain = nn.Parameter(torch.ones(rows, 16))
    plain.grad = torch.ones_like(plain)
    optim.Adam([parameter], lr=0.1).step()
    torch.optim.Adam([plain], lr=0.1).step()
    assert torch.allclose(parameter, plain)
    parameter, optimizer = stepped()
    parameter.data = torch.zeros(64, 16)  # other data of the same shape
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.allclose(parameter, torch.full((64, 16), -0.1), atol=1e-4)


def test_no_gradient_is_read_while_a_step_runs_in_the_background(monkeypatch):
    """That step sets gradients to None in its thread: reading one there at the same time would corrupt memory."""
    reads, check = [], lifecycle.check_gradients
    monkeypatch.setattr(lifecycle, "check_gradients", lambda contents: reads.append(1) or check(contents))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    pipeline = RoundPipe(model, devices="virtual:2")
    optimizer = torch.optim.Adam(pipeline.optim_parameters())
    for _ in range(3):
        pipeline.forward_backward((torch.ones(6, 4),), label=torch.ones(6, 2), loss_fn=nn.functional.mse_loss)
        pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=True)
    pipeline.synchronize()
    assert len(reads) == 1


HALF = {"optim_dtype": torch.float32, "gradient_dtype": torch.bfloat16}


OPTIMIZERS = {
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "one that clips": lambda params: Clips(params, lr=0.1),
}


def halved(wrap, **options):
    return wrap(small_model().bfloat16(), **{**HALF, "model_run_config": MEAN, **options})


def run(pipe):
    inputs, labels = batch(6)
    return pipe.forward_backward(
        (inputs.bfloat16(),), label=labels, loss_fn=lambda outputs, targets: F.mse_loss(outputs.float(), targets)
    )


def rounded(steps, make, wrap, **options):
    pipe = halved(wrap, gradient_dtype=None, name="same", **options)
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
    make = OPTIMIZERS[name]
    groups, how = ({"replicas": 2}, False) if how == "groups" else ({}, how)
    pipe = halved(wrap, name="same", **groups)
    with OptimizerCtx():
        optimizer = make(list(pipe.parameters()))
    steps = 1 if how is True else 4  # weights one step old lead elsewhere
    word = contextlib.nullcontext()
    if how == "exact" and name == "one that clips":
        word = pytest.warns(UserWarning, match="Clips does not update one parameter after the other")
    with word:
        for _ in range(steps):
            run(pipe)
            assert {p.grad.dtype for p in pipe.optim_parameters()} == {torch.bfloat16}
            if how == "outside":
                optimizer.step()
                optimizer.zero_grad()
            else:
                pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), how)
    pipe.synchronize()
    assert same_bits([p.detach() for p in pipe.optim_parameters()], rounded(steps, make, wrap, **groups))


def test_frozen_parameters_hooks_and_pickles_keep_the_dtype_and_runs_add_up(wrap):
    pipe = halved(wrap)
    pipe.model[0].requires_grad_(False)
    names = dict(pipe.optim_named_parameters())
    seen = []
    names["2.weight"].register_hook(lambda gradient: seen.append(gradient.dtype))
    run(pipe)
    assert names["0.weight"].grad is None
    once = {name: p.grad.clone() for name, p in names.items() if p.grad is not None}
    pipe.model[0].requires_grad_(True)
    run(pipe)
    assert all(relative_error(names[name].grad, 2 * gradient) < 1e-2 for name, gradient in once.items())
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
    pipe = halved(wrap)
    optimizer = torch.optim.LBFGS(pipe.optim_parameters())
    with pytest.raises(ConfigError, match="LBFGS was given a closure"):
        pipe.step(lambda: optimizer.step(lambda: run(pipe)))


@pytest.mark.parametrize("options", [{"gradient_dtype": torch.bfloat16}, {**HALF, "gradient_dtype": "bfloat16"}])
def test_a_dtype_that_has_no_meaning_is_refused(options):
    with pytest.raises(ConfigError, match="gradient_dtype, the dtype of gradients of master weights"):
        RoundPipe(small_model(), **options)


INPUTS, LABELS = torch.randn(6, 4, generator=torch.Generator().manual_seed(2)), torch.zeros(6, 3)


@pytest.fixture
def trained():
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16()
    model = copy.deepcopy(plain)
    pipe = RoundPipe(model, torch.float32, devices="virtual:2", model_run_config=MEAN)
    inputs, labels = INPUTS.bfloat16(), LABELS.bfloat16()
    F.mse_loss(plain(inputs), labels).backward()
    pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
    return plain, model, pipe


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
    given = {"pipe": pipe.parameters(), "model": model.parameters(), "copies": pipe.optim_parameters()}[of]
    assert float(norm(given)) == pytest.approx(expected, rel=0.02)


CHANGES = {
    "norm": lambda given: clip_grad_norm_(given, 0.01),
    "value": lambda given: clip_grad_value_(given, 1e-3),
    "by a norm": lambda given: clip_grads_with_norm_(given, 0.01, torch.tensor(2.0)),
    "in place": lambda given: [one.grad.mul_(0.5) for one in given],
    "another": lambda given: [setattr(one, "grad", one.grad * 0.5) for one in given],
    "a backward": lambda given: sum((one * one).sum() for one in given).backward(),
    "none": lambda given: [setattr(one, "grad", None) for one in given],
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
    done = fresh_process.run("-m", "tests.runtime.optim.eight_bits", str(tmp_path / "saved"), timeout=300)
    assert done.returncode == 0, done.stderr
