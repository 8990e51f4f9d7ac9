"""Steps of any optimizer, exact or one step old, and functions that steps are given."""

import copy
import functools
import threading
from concurrent.futures import Future

import pytest
import torch
from torch import nn

from roundpipe_runtime import ConfigError, GradScaler, OptimizerCtx, RoundPipe, RoundPipeRunConfig, StageError, optim
from roundpipe_runtime.pipeline.live import bound_now
from tests import fresh_process
from tests.modules import module_of
from tests.runtime.small import MEAN, batch, relative_error, small_model

F = nn.functional


def run(pipe):
    inputs, labels = batch(6)
    return pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)


def plain(steps, make, stale):
    """The same training in plain float64 PyTorch; with `stale`, gradients are those of the weights one step ago."""
    model = small_model().double()
    optimizer = make(model.parameters())
    inputs, labels = (tensor.double() for tensor in batch(6))
    reads = copy.deepcopy(model)
    for _ in range(steps):
        before = copy.deepcopy(model)
        used = reads if stale else model
        used.zero_grad()
        F.mse_loss(used(inputs), labels).backward()
        for own, other in zip(model.parameters(), used.parameters(), strict=True):
            own.grad = other.grad.clone()
        optimizer.step()
        reads = before
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
        lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
        lambda params: torch.optim.Adagrad(params, lr=0.05),
        lambda params: optim.Adam(params, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    ],
)
def test_any_optimizer_exact_or_one_step_old(devices, make, dtype, is_async):
    pipe = RoundPipe(small_model(), dtype, devices=devices, model_run_config=MEAN)
    with OptimizerCtx():
        optimizer = make(pipe.parameters())
    for _ in range(6):
        run(pipe)
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async)
    pipe.synchronize()
    for parameter, expected in zip(pipe.parameters(), plain(6, make, is_async), strict=True):
        assert relative_error(parameter.detach(), expected) < 1e-4


def test_a_step_beside_a_run_finds_the_models_parameters(devices):
    inside, listed = threading.Event(), threading.Event()

    class Waits(nn.Linear):
        def forward(self, x):
            if inside.armed:
                inside.set()
                listed.wait(10)
            return super().forward(x)

    inside.armed = False
    layer = Waits(4, 3)
    pipe = RoundPipe(nn.Sequential(layer), devices=devices, model_run_config=MEAN)
    run(pipe)
    first = layer.weight.grad.clone()
    found = []

    def step():
        inside.wait(10)
        found.extend(pipe.named_parameters("model"))
        pipe.zero_grad()
        listed.set()

    expected = [("model.0.weight", layer.weight), ("model.0.bias", layer.bias)]
    inside.armed = True
    pipe.step(step, is_async=True)
    run(pipe)
    pipe.synchronize()
    assert [(name, id(parameter)) for name, parameter in found] == [(name, id(p)) for name, p in expected]
    assert relative_error(layer.weight.grad, first) < 1e-6  # the second gradient alone, as the step forgot the first


def test_an_asynchronous_step_does_not_wait(devices):
    model = small_model()
    pipe = RoundPipe(model, devices=devices, model_run_config=MEAN)
    inputs, labels = batch(6)
    first = run(pipe)
    go = threading.Event()

    def slow():
        go.wait(10)
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.zero_()

    pipe.step(slow, is_async=True)
    with torch.no_grad():
        stale = F.mse_loss(pipe(inputs), labels)  # an evaluation does not count as the next run
    assert relative_error(stale, first) < 1e-6
    go.set()
    assert run(pipe).equal(first)
    assert relative_error(run(pipe), (labels**2).mean()) < 1e-6


def within(seconds, call):
    found = Future()

    def run():
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found.result(seconds)


def no_room(*args):
    raise MemoryError("no room")


@pytest.mark.parametrize("failing", [0, 1])  # no layer, or one, has the new version by then
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_publication_that_fails_is_raised_and_repeated(devices, monkeypatch, dtype, failing):
    pipe = RoundPipe(small_model(), dtype, devices=devices, model_run_config=MEAN)
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
    store, calls = pipe._rp_engine.store, []
    refresh = store.refresh

    def fails_late(parameters):
        calls.append(parameters)
        return no_room() if len(calls) > failing else refresh(parameters)

    monkeypatch.setattr(store, "refresh", fails_late)

    def step():
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=True)

    run(pipe), step(), run(pipe)  # what the first step did is published beside the run that follows
    with pytest.raises(MemoryError, match="no room") as caught:
        within(20, lambda: run(pipe))
    assert any("was copied to the parameters" in note for note in caught.value.__notes__)
    monkeypatch.undo()
    step(), within(20, lambda: run(pipe)), step()
    within(20, pipe.synchronize)
    expected = plain(3, lambda params: torch.optim.SGD(params, lr=0.1), True)
    for parameter, other in zip(pipe.optim_parameters(), expected, strict=True):
        assert relative_error(parameter, other) < 1e-4


@pytest.mark.parametrize(
    "read",
    [lambda pipe, x: pipe.synchronize(), lambda pipe, x: pipe(x), lambda pipe, x: pipe(x).sum().backward()],
    ids=["synchronize", "forward", "backward"],
)
def test_whoever_waits_for_a_publication_that_fails_gets_its_error(devices, monkeypatch, read):
    """And the next call brings the parameters to what the step made of them."""
    pipe = RoundPipe(small_model(), devices=devices, model_run_config=MEAN)
    inputs = batch(6)[0]
    monkeypatch.setattr(pipe._rp_engine.store, "refresh", no_room)
    pipe.step(lambda: [p.data.fill_(2.0) for p in pipe.parameters()], is_async=True)
    run(pipe)
    with pytest.raises(MemoryError, match="no room"):
        within(20, lambda: read(pipe, inputs))
    with torch.no_grad(), pytest.raises(MemoryError, match="no room"):
        within(20, lambda: read(pipe, inputs.clone()))
    monkeypatch.undo()
    within(20, pipe.synchronize)
    with torch.no_grad():
        assert torch.equal(within(20, lambda: pipe(inputs)), pipe.model(inputs))


def test_a_publication_that_cannot_start_is_raised_and_repeated(devices, monkeypatch):
    """Without a thread for it (the process has none left) the run raises; the next one publishes, and does not wait."""
    pipe = RoundPipe(small_model(), devices=devices, model_run_config=MEAN)
    inputs = batch(6)[0]
    pipe.step(lambda: [p.data.fill_(2.0) for p in pipe.parameters()], is_async=True)
    pipe._rp_engine.steps.wait_update()

    def no_thread(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pipe._rp_engine.steps._worker, "submit", no_thread)
    with pytest.raises(RuntimeError, match="new thread"):
        within(20, lambda: run(pipe))
    assert all(parameter.grad is None for parameter in pipe.parameters())
    monkeypatch.undo()
    within(20, lambda: run(pipe))
    with torch.no_grad():
        assert torch.equal(within(20, lambda: pipe(inputs)), pipe.model(inputs))


def test_a_step_gets_its_arguments_and_the_optimizers_parameters_and_state_dict_waits_for_it(devices):
    pipe = RoundPipe(small_model().to(torch.bfloat16), torch.float32, devices=devices)
    found = []
    for is_async in (False, True):
        pipe.step(lambda a, b: found.append((a, b, next(pipe.parameters()).dtype)), is_async, 1, b=2)
        pipe.synchronize()
    assert found == [(1, 2, torch.float32)] * 2
    pipe.step(lambda: [p.data.fill_(2.0) for p in pipe.parameters()], is_async=True)
    assert all((tensor == 2.0).all() for tensor in pipe.state_dict().values())


def as_real(parameter):
    return torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}, {"decoupled_weight_decay": True}])
def test_adam_steps_complex_parameters_as_torch_does(dtype, options):
    generator = torch.Generator().manual_seed(0)

    def parameters(dtype):
        shapes = [((3, 2), dtype), ((4,), dtype.to_real()), ((5,), dtype)]
        return [torch.randn(shape, dtype=kind, generator=generator).requires_grad_() for shape, kind in shapes]

    ours = parameters(dtype)
    theirs = [parameter.detach().clone().requires_grad_() for parameter in ours]
    found = optim.Adam(ours[:2], lr=0.01, weight_decay=0.1, **options)
    expected = torch.optim.Adam(theirs[:2], lr=0.01, weight_decay=0.1, foreach=False, **options)
    found.add_param_group({"params": ours[2:]})
    expected.add_param_group({"params": theirs[2:]})
    for step in range(5):
        if step == 3:
            state, found = found.state_dict(), optim.Adam([{"params": ours[:2]}, {"params": ours[2:]}])
            found.load_state_dict(state)
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, dtype=one.dtype, generator=generator)
            other.grad = one.grad.clone()
        found.step()
        expected.step()
    for one, other in zip(ours, theirs, strict=True):
        assert relative_error(as_real(one), as_real(other)) < 1e-6


def test_adam_steps_the_complex_parameters_of_a_pipeline():
    def turn(self, x):
        return torch.view_as_real(torch.view_as_complex(x.reshape(-1, 4, 2)) * self.angle).flatten(1)

    torch.manual_seed(0)
    turned = nn.Linear(6, 8), module_of(turn, angle=torch.randn(4, dtype=torch.complex64)), nn.Linear(8, 2)
    model = nn.Sequential(*turned)
    plain = copy.deepcopy(model)
    inputs, labels = torch.randn(6, 6), torch.randn(6, 2)
    wrapped = RoundPipe(model, devices="virtual:2")
    found, expected = optim.Adam(wrapped.optim_parameters(), lr=0.01), torch.optim.Adam(plain.parameters(), lr=0.01)
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)
    for _ in range(4):
        wrapped.forward_backward((inputs,), label=labels, loss_fn=nn.functional.mse_loss, run_config=config)
        wrapped.step(lambda: (found.step(), found.zero_grad()))
        expected.zero_grad()
        nn.functional.mse_loss(plain(inputs), labels).backward()
        expected.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert relative_error(as_real(one), as_real(other)) < 1e-4


def test_adam_refuses_what_it_cannot_do():
    parameters = list(small_model().parameters())
    with pytest.raises(ConfigError, match="capturable"):
        optim.Adam(parameters, capturable=True)
    with pytest.warns(UserWarning, match="ignored"):
        optim.Adam(parameters, foreach=True)


def test_a_background_step_that_calls_the_pipeline_is_an_error(devices):
    """LBFGS calls the model. It would wait for its own end; it is told so, and run at once it works."""
    pipe = RoundPipe(small_model(), devices=devices, model_run_config=MEAN)
    optimizer = torch.optim.LBFGS(pipe.parameters(), max_iter=3)

    def closure():
        pipe.zero_grad()
        return run(pipe)

    pipe.step(lambda: optimizer.step(closure), is_async=True)
    with pytest.raises(StageError, match="waits for that function"):
        pipe.synchronize()
    before = closure()
    pipe.step(lambda: optimizer.step(closure))
    assert closure() < before


def test_a_background_step_may_forget_gradients_and_update_the_scale(devices):
    pipe = RoundPipe(small_model(), torch.float64, devices=devices, model_run_config=MEAN)
    scaler = GradScaler(init_scale=4.0)
    run(pipe)
    pipe.step(lambda: (pipe.zero_grad(), scaler.update(2.0)), is_async=True)
    pipe.synchronize()
    assert scaler.get_scale() == 2.0
    assert all(parameter.grad is None for parameter in pipe.optim_parameters())


def test_a_last_step_that_fails_is_reported_at_the_end_of_the_process():
    """Nobody waits for it, and the process does not look like a success."""
    code = (
        "import torch\n"
        "from roundpipe_runtime import RoundPipe\n"
        "pipe = RoundPipe(torch.nn.Linear(2, 2), devices='virtual:1')\n"
        "pipe.step(lambda: 1 / 0, is_async=True)\n"
    )
    found = fresh_process.run("-c", code)
    assert "the last step(..., is_async=True) failed" in found.stderr
    assert "ZeroDivisionError" in found.stderr


NAME = "first"


def read():
    return NAME


def indirect():
    return read()


def test_a_function_reads_the_names_of_its_module_and_around_it_as_they_were(monkeypatch):
    name, default = "first", "first"

    def inner():
        return name

    functions = (read, indirect, lambda: NAME, lambda: [read() for _ in "x"].pop())
    around = (lambda: name, lambda: inner(), lambda default=default: default)
    made = [bound_now(function) for function in (*functions, *around)]
    monkeypatch.setitem(globals(), "NAME", "second")
    name = "second"
    assert [function() for function in made] == ["first"] * 7
    assert (read(), inner()) == ("second", "second")


def test_a_function_that_writes_names_or_holds_its_arguments_is_left_alone():
    count = 0

    def step():
        nonlocal count
        count += 1

    for function in (step, functools.partial(print), threading.Event().set):
        assert bound_now(function) is function
    bound_now(step)()
    assert count == 1


def trained(mode):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 256), *[torch.nn.Linear(256, 256) for _ in range(6)])
    model = RoundPipe(layers, devices="virtual:2")
    parameters = list(model.parameters())
    first, second = torch.optim.Adam(parameters[:8], lr=1e-3), torch.optim.SGD(parameters[8:], lr=1e-2)
    x = torch.randn(6, 8)
    for step in range(8):
        optimizer = second if step % 2 else first
        model.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().mean())
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=mode)  # noqa: B023 # the point
        optimizer = None
    model.synchronize()
    weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
    model.close()
    return weights


def test_two_optimizers_in_turns_train_as_without_a_thread():
    assert torch.equal(trained("exact"), trained(False))
