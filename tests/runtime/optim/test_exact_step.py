"""step(..., is_async="exact"): the step runs next to the next run, and nothing else differs."""

import contextlib
import threading
import time

import pytest
import torch
from torch import nn

from roundpipe_runtime import GradScaler, OptimizerCtx, RoundPipeWarning, StageError
from roundpipe_runtime.device.worker import Worker
from tests.runtime.small import MEAN, batch, relative_error, same_bits, small_model

F = nn.functional
STEPS = 10


def two_groups(params):
    found = list(params)
    return [{"params": found[:3], "lr": 0.03}, {"params": found[3:], "weight_decay": 0.1}]


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def matrices_apart(params):
    found = list(params)
    matrices = [p for p in found if p.ndim == 2]
    return torch.optim.Muon(matrices, lr=0.01), torch.optim.SGD([p for p in found if p.ndim != 2], lr=0.1)


def clipped(pipe, optimizer):
    nn.utils.clip_grad_norm_(pipe.parameters(), 0.05)
    optimizer.step()


class Trained:
    def __init__(
        self, wrap, mode, make, *, dtype=None, model=None, runs=1, step=None, after=None, schedule=None, clears=True
    ):
        self.model = model() if model else small_model(tied=True, dropout=0.1)
        self.pipe = wrap(self.model, dtype, model_run_config=MEAN, name="exact")
        self.mode, self.runs, self.clears = mode, runs, clears
        with OptimizerCtx():
            made = make(self.pipe.parameters())
        self.optimizers = made if isinstance(made, tuple) else (made,)
        self.schedulers = [schedule(optimizer) for optimizer in self.optimizers] if schedule else []
        self.scale = lambda loss: loss
        self.step_one = step or (lambda pipe, optimizer: optimizer.step())
        self.after = after or (lambda trained: None)
        self.losses = []

    def run(self):
        inputs, labels = batch(6)

        def loss_fn(outputs, targets):
            return self.scale(F.mse_loss(outputs, targets.to(outputs.dtype)))

        for part in torch.arange(6).chunk(self.runs):
            found = self.pipe.forward_backward(
                (inputs[part].to(self.model[0].weight.dtype),), label=labels[part], loss_fn=loss_fn
            )
            self.losses.append(found)

    def step(self):
        self.pipe.step(self.whole_step, self.mode)
        self.after(self)

    def whole_step(self):
        for optimizer in self.optimizers:
            self.step_one(self.pipe, optimizer)
            if self.clears:
                optimizer.zero_grad()

    def steps(self, number):
        for _ in range(number):
            self.run()
            self.step()

    def results(self):
        self.pipe.synchronize()
        states = [self.pipe.optim_parameters(), self.pipe.state_dict().values()]
        for optimizer in self.optimizers:
            found = optimizer.state_dict()["state"].values()
            states.append([v for state in found for v in state.values() if isinstance(v, torch.Tensor)])
        return self.losses + [tensor.detach().clone() for state in states for tensor in state]


def bfloat16_model():
    return small_model(tied=True).bfloat16()


CASES = {
    "plain": {},
    "groups": {"make": lambda params: adamw(two_groups(params))},
    "momentum": {"make": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)},
    "foreach": {"make": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, foreach=True)},
    "two optimizers": {"make": matrices_apart},
    "master weights": {"dtype": torch.float32, "model": bfloat16_model},
    "bfloat16": {"model": bfloat16_model},
    "accumulated": {"runs": 2},
    "clipped": {"step": clipped},
    "scheduled": {
        "schedule": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
        "after": lambda trained: [scheduler.step() for scheduler in trained.schedulers],
    },
    "cleared outside": {
        "clears": False,  # two threads that clear the same gradients at once crash in torch
        "after": lambda trained: [optimizer.zero_grad() for optimizer in trained.optimizers],
    },
}


@pytest.mark.parametrize("case", CASES)
def test_all_steps_have_the_bits_of_synchronous_ones(wrap, case):
    found = []
    for mode in (False, "exact"):
        torch.manual_seed(0)
        trained = Trained(wrap, mode, **{"make": adamw, **CASES[case]})
        trained.steps(STEPS)
        found.append(trained.results())
    assert trained.pipe._rp_engine.table.latest == STEPS - 1  # all but the first were next to a run
    assert same_bits(*found)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("updates_inside", [False, True])
def test_a_scaler_scales_and_skips_as_in_synchronous_steps(wrap, fused, kind, updates_inside):
    if kind is torch.amp.GradScaler and updates_inside:
        pytest.skip("torch's scaler does not know that a loss is of a later run than its update")
    found = []
    for mode in (False, "exact"):
        options = {"init_scale": 2.0**124, "growth_interval": 1}
        scaler = kind(**options) if kind is GradScaler else kind("cpu", **options)
        trained = Trained(wrap, mode, lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused))
        trained.scale = scaler.scale

        def step(pipe, optimizer, scaler=scaler):
            scaler.step(optimizer)
            if updates_inside:
                scaler.update()

        trained.step_one = step
        scaler.scale(torch.ones(()))  # its tensors are there before two devices ask for them
        for _ in range(STEPS):
            trained.run()
            trained.step()
            if not updates_inside:
                scaler.update()
        trained.pipe.synchronize()
        found.append([*trained.results(), torch.tensor(scaler.get_scale())])
    assert found[0][-1] < 2.0 ** (124 + STEPS)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*found, strict=True))


def test_hooks_of_an_optimizer_run_once_and_around_the_whole_step(wrap):
    """A hook before it changes all gradients. One after it may change parameters, so that the step is not hidden."""
    found = []
    for mode in (False, "exact"):
        trained = Trained(wrap, mode, adamw)
        calls = []

        def before(optimizer, args, kwargs, calls=calls):
            calls.append("before")
            for group in optimizer.param_groups:
                nn.utils.clip_grad_norm_(group["params"], 0.05)

        trained.optimizers[0].register_step_pre_hook(before)
        trained.steps(4)
        trained.pipe.synchronize()
        assert calls == ["before"] * 4

        @torch.no_grad()
        def after(optimizer, args, kwargs, calls=calls):
            assert args[0] is optimizer
            calls.append("after")
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.1, 0.1)

        trained.optimizers[0].register_step_post_hook(after)
        word = pytest.warns(RoundPipeWarning, match="AdamW has hooks that run after its step")
        with word if mode == "exact" else contextlib.nullcontext():
            trained.steps(4)
        assert calls[4:] == ["before", "after"] * 4
        found.append(trained.results())
    assert same_bits(*found)


class Waits(torch.optim.SGD):
    """Updates a parameter that is `awaited` once it may."""

    go = None

    def step(self, closure=None):
        if self.go is not None and any(hasattr(p, "awaited") for group in self.param_groups for p in group["params"]):
            assert self.go.wait(10)
        return super().step(closure)


def test_the_next_run_begins_before_the_last_layer_is_updated(wrap):
    trained = Trained(wrap, "exact", lambda params: Waits(params, lr=0.1))
    trained.run()
    trained.step()
    go = threading.Event()
    trained.model[0].register_forward_hook(lambda *_: go.set())
    for parameter in trained.model[-1].parameters():
        parameter.awaited = True
    trained.run()
    go.clear()
    trained.optimizers[0].go = go
    trained.step()
    assert not go.is_set()
    trained.run()
    assert go.is_set()


@pytest.mark.parametrize("of", ["model", "optimizer"])
def test_what_saves_waits_for_the_step(wrap, of):
    trained = Trained(wrap, "exact", lambda params: Waits(params, lr=0.1, momentum=0.9))
    (optimizer,) = trained.optimizers
    trained.steps(2)
    trained.run()
    trained.pipe.synchronize()
    bias = trained.model[-1].bias
    momentum = 0.9 * optimizer.state[bias]["momentum_buffer"] + bias.grad
    expected = {"model": bias.detach() - 0.1 * momentum, "optimizer": momentum}[of]
    bias.awaited = True
    go = optimizer.go = threading.Event()
    trained.step()
    threading.Timer(0.1, go.set).start()
    if of == "model":
        found = trained.pipe.state_dict()[f"{len(trained.model) - 1}.bias"]
    else:
        found = list(optimizer.state_dict()["state"].values())[-1]["momentum_buffer"]
    assert go.is_set()
    assert relative_error(found, expected) < 1e-6


def in_a_step_that_waits(wrap):
    trained = Trained(wrap, "exact", lambda params: Waits(params, lr=0.1), model=small_model)
    trained.steps(2)
    trained.run()
    trained.model[-1].bias.awaited = True
    go = trained.optimizers[0].go = threading.Event()
    trained.step()
    return trained, go


def test_a_run_of_another_thread_waits_for_each_layer(wrap):
    trained, go = in_a_step_that_waits(wrap)
    inputs, found = batch(6)[0], []

    def evaluate():
        with torch.no_grad():
            found.append(trained.pipe(inputs))

    thread = threading.Thread(target=evaluate)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    go.set()
    thread.join(10)
    with torch.no_grad():
        assert relative_error(found[0], trained.model(inputs)) < 1e-6


def test_a_pipeline_that_shares_parameters_waits(wrap):
    """It does not know of the other one's layers, so it waits for the whole step."""
    trained, go = in_a_step_that_waits(wrap)
    other = wrap(nn.Sequential(*trained.model[4:]), model_run_config=MEAN)
    threading.Timer(0.1, go.set).start()
    with torch.no_grad():
        found = other(torch.ones(6, 6))
        trained.pipe.synchronize()
        assert relative_error(found, nn.Sequential(*trained.model[4:])(torch.ones(6, 6))) < 1e-6


def test_lbfgs_runs_before_the_call_returns_and_a_warning_names_it(wrap):
    def three_steps(mode):
        trained = Trained(wrap, mode, lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3), dtype=torch.float64)
        inputs, labels = batch(6)

        def closure():
            trained.pipe.zero_grad()
            return trained.pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)

        for _ in range(3):
            trained.pipe.step(lambda: trained.optimizers[0].step(closure), mode)
        return [p.detach().clone() for p in trained.pipe.optim_parameters()]

    expected = three_steps(False)
    with pytest.warns(RoundPipeWarning, match="The step of LBFGS was given a closure"):
        assert same_bits(three_steps("exact"), expected)


def test_parameters_outside_of_the_pipeline_are_updated_when_the_call_returns(wrap):
    """The next run does not wait for them, since it does not know them."""
    head = nn.Parameter(torch.ones(3))

    def give_a_gradient(trained=None):
        head.grad = torch.ones(3)

    give_a_gradient()
    trained = Trained(wrap, "exact", lambda params: torch.optim.SGD([*params, head], lr=0.1), after=give_a_gradient)
    with pytest.warns(RoundPipeWarning, match="SGD also updates parameters that are in no layer"):
        trained.steps(3)
    assert relative_error(head.detach(), torch.full((3,), 0.7)) < 1e-6


def test_a_change_after_the_optimizer_is_an_error_of_the_next_run(wrap):
    trained = Trained(wrap, "exact", lambda params: torch.optim.SGD(params, lr=0.1))

    def step():
        trained.whole_step()
        with torch.no_grad():
            trained.model[0].weight.clamp_(-0.1, 0.1)

    for _ in range(2):  # the first step ends before it returns
        trained.run()
        trained.pipe.step(step, "exact")
    with pytest.raises(StageError, match=r"layer 0 \(Linear\) was changed after the step"):
        trained.run()
    assert all(parameter.grad is None for parameter in trained.pipe.parameters())
    trained.run()
    trained.pipe.step(step)
    assert trained.model[0].weight.abs().max() <= 0.1


def test_gradients_zeroed_in_place_outside_are_an_error(wrap):
    trained = Trained(wrap, "exact", lambda params: Waits(params, lr=0.1), model=small_model)
    trained.whole_step = trained.optimizers[0].step
    for _ in range(2):
        trained.run()
        trained.step()
        trained.pipe.zero_grad()
    trained.run()
    trained.model[0].bias.awaited = True
    go = trained.optimizers[0].go = threading.Event()
    trained.step()
    trained.optimizers[0].zero_grad(set_to_none=False)
    go.set()
    with pytest.raises(StageError, match="was written while the optimizer's step still needed it"):
        trained.run()
    trained.pipe.zero_grad()
    trained.run()


class Fails(torch.optim.SGD):
    def step(self, closure=None):
        if any(hasattr(p, "bad") for group in self.param_groups for p in group["params"]):
            raise ArithmeticError("no step")
        return super().step(closure)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_an_error_in_a_layers_update_is_raised_once_by_the_next_run(wrap, dtype):
    trained = Trained(wrap, "exact", lambda params: Fails(params, lr=0.1), dtype=dtype, model=small_model)
    trained.steps(2)
    trained.run()
    trained.pipe.synchronize()
    before = [p.detach().clone() for p in trained.pipe.optim_parameters()]
    targets = list(trained.pipe.optim_parameters())
    stepped = [p.detach() - 0.1 * p.grad for p in targets]
    targets[2].bad = True
    trained.step()
    with pytest.raises(ArithmeticError, match="no step"):
        trained.run()
    expected = stepped[:2] + before[2:]
    assert all(relative_error(p.detach(), e) < 1e-6 for p, e in zip(targets, expected, strict=True))
    del targets[2].bad
    trained.pipe.zero_grad()
    trained.run()
    trained.step()
    trained.run()
    with torch.no_grad():
        assert relative_error(trained.pipe(batch(6)[0]), trained.model(batch(6)[0])) < 1e-6


def test_an_error_before_the_optimizer_is_raised_by_the_call(wrap):
    trained = Trained(wrap, "exact", adamw)
    trained.steps(2)
    trained.run()

    def broken():
        raise ArithmeticError("clipping")

    with pytest.raises(ArithmeticError, match="clipping"):
        trained.pipe.step(broken, "exact")
    trained.step()
    trained.run()


def test_calling_the_pipeline_after_the_optimizer_is_refused(wrap):
    """The function would wait for a run that waits for the function."""
    trained = Trained(wrap, "exact", adamw)

    def step():
        trained.whole_step()
        with torch.no_grad():
            trained.pipe(batch(6)[0])

    for _ in range(2):
        trained.run()
        trained.pipe.step(step, "exact")
    with pytest.raises(StageError, match="called the pipeline, which waits"):
        trained.run()
    trained.run()


def test_a_step_that_is_faster_than_its_caller_is_refused_too(wrap, monkeypatch):
    """The function calls the pipeline before the caller's thread has the future of the step."""
    trained = Trained(wrap, "exact", adamw)
    begun, calls = threading.Event(), []

    def step():
        trained.whole_step()
        begun.set()
        if len(calls) == 2:
            with torch.no_grad():
                trained.pipe(batch(6)[0])

    def submit(self, work, *args):
        future = original(self, work, *args)
        if self.name == "optimizer":
            begun.wait(60)
            time.sleep(0.2)
        return future

    def check_can_run():
        check()
        if engine.steps.is_here():  # the next run is the first to have the lock
            time.sleep(1)

    original, engine = Worker.submit, trained.pipe._rp_engine
    check = engine.check_can_run
    monkeypatch.setattr(Worker, "submit", submit)
    monkeypatch.setattr(engine, "check_can_run", check_can_run)
    for number in (1, 2):
        calls.append(number)
        begun.clear()
        trained.run()
        trained.pipe.step(step, "exact")
    with pytest.raises(StageError, match="called the pipeline, which waits"):
        trained.run()


def test_a_second_run_without_a_step_copies_no_master_weight(wrap):
    trained = Trained(wrap, False, adamw, dtype=torch.float32, model=bfloat16_model)
    trained.run()
    versions = [p._version for p in trained.model.parameters()]
    trained.run()
    assert [p._version for p in trained.model.parameters()] == versions
    trained.optimizers[0].step()  # fused: torch counts no version
    trained.run()
    assert all(p._version > version for p, version in zip(trained.model.parameters(), versions, strict=True))
    masters = [master.to(torch.bfloat16) for master in trained.pipe.optim_parameters()]
    assert same_bits(list(trained.model.parameters()), masters)
