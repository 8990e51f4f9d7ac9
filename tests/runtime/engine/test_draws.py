"""Draws of layers from any generator are repeated in a recomputation, also inside of `torch.utils.checkpoint`."""

import contextlib
import copy
import pathlib
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import roundpipe_runtime
from roundpipe_runtime import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, StageError, doing_recompute
from roundpipe_runtime.cli import demo
from roundpipe_runtime.engine import planner, recomputed
from roundpipe_runtime.engine.draws import Draws, move_generator, traits_of
from roundpipe_runtime.engine.layer_graph import run_backward, watch_forward
from roundpipe_runtime.engine.recomputed import VisitGenerator, run_seeded
from tests.modules import module_of
from tests.runtime.small import near_gradients, same_bits

F = nn.functional


def table_of(draw, shape):
    return [[draw() for _ in range(shape[1])] for _ in range(shape[0])]


KINDS = {
    "numpy": lambda layer, shape: np.random.rand(*shape),
    "numpy normal": lambda layer, shape: np.random.normal(size=shape),
    "python": lambda layer, shape: table_of(random.random, shape),
    "python normal": lambda layer, shape: table_of(lambda: random.gauss(0, 1), shape),
    "held by torch": lambda layer, shape: torch.rand(shape, generator=layer.torch, dtype=torch.float64),
    "held by numpy": lambda layer, shape: layer.numpy.random(shape),
    "held by an older numpy": lambda layer, shape: layer.many["old"].rand(*shape),
    "held by python": lambda layer, shape: table_of(layer.many["own"].random, shape),
}


class Masks(nn.Module):
    """Multiplies with a weight, and with numbers drawn anew at each call."""

    def __init__(self, kind):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.draw = KINDS[kind]
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(2)
        self.many = {"old": np.random.RandomState(3), "own": random.Random(4)}
        self.has_begun = True

    def forward(self, x):
        if not self.has_begun:
            return x * self.weight
        return x * self.weight * torch.as_tensor(self.draw(self, x.shape), dtype=torch.float64).to(x.device)


def model_of(kind, layers=3):
    return nn.Sequential(*[Masks(kind) for _ in range(layers)], nn.Identity())


def states(model):
    found = [random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2:]]
    for layer in [layer for layer in model if isinstance(layer, Masks)]:
        old = layer.many["old"].get_state()
        found += [layer.torch.get_state().tolist(), layer.numpy.bit_generator.state, old[1].tolist(), old[2:]]
        found.append(layer.many["own"].getstate())
    return repr(found)


@pytest.fixture(autouse=True)
def found_states():
    before = np.random.get_state(), random.getstate(), torch.get_rng_state()
    np.random.seed(7), random.seed(7), torch.manual_seed(7)
    yield
    np.random.set_state(before[0]), random.setstate(before[1]), torch.set_rng_state(before[2])


def all_recomputed(layers, microbatches, **fields):
    cut = [range(1), range(1, layers)] if layers > 1 else [range(1)]
    plan = ModelExecutePlan(cut, [range(layers, layers + 1), *reversed(cut)])
    return RoundPipeRunConfig(execute_plan=plan, num_microbatch=microbatches, **fields)


def total(outputs, labels):
    return outputs.sum()


INPUTS = torch.arange(1.0, 25.0, dtype=torch.float64).reshape(6, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_one_microbatch_draws_what_the_plain_layers_draw(pipe, kind, grain):
    plain = model_of(kind)
    model = pipe(copy.deepcopy(plain))
    losses = []
    for _ in range(2):
        loss = plain(INPUTS).sum()
        loss.backward()
        losses.append(loss.item())
    expected = states(plain)
    np.random.seed(7), random.seed(7)
    config = all_recomputed(3, 1, recompute_grain=grain)
    found = [model.forward_backward((INPUTS,), loss_fn=total, run_config=config).item() for _ in range(2)]
    assert found == pytest.approx(losses, rel=1e-12)
    assert near_gradients(model, plain, rtol=1e-12)
    assert states(model.model) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("classic", [False, True])
def test_gradients_are_those_of_the_loss_with_several_microbatches(pipe, kind, classic):
    """The loss is proportional to each weight, so that weight times gradient is the loss, if both have one mask."""
    model = pipe(model_of(kind), devices="virtual:3:check")
    if classic:
        loss = model(INPUTS, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=3)).sum()
        loss.backward()
    else:
        loss = model.forward_backward((INPUTS,), loss_fn=total, run_config=all_recomputed(3, 3))
    for parameter in model.parameters():
        assert (parameter * parameter.grad).item() == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_do_not_depend_on_the_devices_and_a_failed_run_draws_nothing(pipe, kind):
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("on purpose")

    seen = []
    config = RoundPipeRunConfig(num_microbatch=3)
    for devices in ("virtual:1", "virtual:3"):
        np.random.seed(7), random.seed(7)
        model = pipe(model_of(kind), devices=devices)
        found = [model.forward_backward((INPUTS,), loss_fn=total, run_config=config).item() for _ in range(2)]
        seen.append((found, states(model.model)))
    assert seen[0] == seen[1]
    assert seen[0][0][0] != seen[0][0][1]
    model = pipe(nn.Sequential(Masks(kind), Fails()))
    before = states(model.model), torch.get_rng_state()
    with pytest.raises(ValueError, match="on purpose"):
        model.forward_backward((INPUTS,), loss_fn=total, run_config=config)
    assert states(model.model) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("kind", ["numpy", "python", "python normal"])
def test_a_layer_that_begins_to_draw_later_is_noticed(pipe, kind):
    model = pipe(nn.Sequential(Masks(kind), nn.Identity()))
    losses = []
    for has_begun in (False, True):
        model[0].has_begun, model[0].weight.grad = has_begun, None
        loss = model.forward_backward((INPUTS,), loss_fn=total, run_config=all_recomputed(1, 2))
        weight = model[0].weight
        assert (weight * weight.grad).item() == pytest.approx(loss.item(), rel=1e-12)
        losses.append(loss.item())
    assert losses[0] == 2 * INPUTS.sum().item() != losses[1]


def test_a_layer_that_wrote_a_buffer_before_it_began_to_draw_fails_in_one_call_only(pipe):
    class Late(nn.BatchNorm1d):
        has_begun = False

        def forward(self, x):
            return F.dropout(super().forward(x), 0.5, training=self.has_begun)

    plain = Late(4)
    model = pipe(nn.Sequential(copy.deepcopy(plain), nn.Identity()))
    for has_begun, match in ((False, None), (True, "must be called again to draw random numbers"), (True, None)):
        plain.has_begun = model[0].has_begun = has_begun
        with contextlib.nullcontext() if match is None else pytest.raises(StageError, match=match):
            model.forward_backward((INPUTS.float(),), loss_fn=total, run_config=all_recomputed(1, 1))
            plain(INPUTS.float())
    assert same_bits(model[0].running_mean, plain.running_mean)
    assert model[0].num_batches_tracked == 2


def test_a_recomputation_that_draws_alone_is_refused(pipe):
    """Drawing in the recomputation only, the layer would be another function there."""

    class Late(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (np.random.rand() if doing_recompute() else 1.0)

    model = pipe(nn.Sequential(Late(4, 4), nn.Identity()))
    config = all_recomputed(1, 1)
    with pytest.raises(StageError, match="draws random numbers in its recomputation, but drew none in its forward"):
        model.forward_backward((INPUTS.float(),), loss_fn=total, run_config=config)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("first_with_gradients", [False, True])
def test_a_restored_state_restores_the_masks(pipe, microbatches, first_with_gradients):
    model = pipe(nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 32), nn.Dropout(0.5)).train())
    config = RoundPipeRunConfig(num_microbatch=microbatches)
    inputs = INPUTS.float()
    state = torch.get_rng_state()
    with torch.set_grad_enabled(first_with_gradients):
        first = model(inputs, roundpipe_run_config=config)
    other = model(inputs, roundpipe_run_config=config)
    torch.set_rng_state(state)
    assert torch.equal(first, model(inputs, roundpipe_run_config=config))
    assert not torch.equal(first, other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_a_pipeline_repeats_its_masks(pipe, reentrant):
    """The gradient is that of the loss: the recomputed call of the pipeline has the masks of the first one."""
    model = pipe(nn.Sequential(nn.Dropout(0.5), nn.Identity()).train())
    weight = torch.ones(6, 4, requires_grad=True)
    loss = checkpoint(lambda w: model(w * 3.0), weight, use_reentrant=reentrant).sum()
    loss.backward()
    assert (weight.grad * weight).sum().item() == pytest.approx(loss.item())


def test_a_pipeline_inside_a_layer_that_draws_repeats_its_masks(pipe):
    """Gradient times weight is the loss; a run moves the generator by one number, that of the outer pipeline."""
    inner = pipe(nn.Sequential(nn.Dropout(0.5), nn.Identity()).train(), devices="virtual:2", name="inner")

    def asks(self, x):
        return inner(F.dropout(x, 0.5)).to(x.device) * self.weight

    model = pipe(
        nn.Sequential(module_of(asks, weight=torch.ones(())), nn.Identity()), devices="virtual:2", name="outer"
    )
    config = all_recomputed(1, 2)
    for _ in range(2):
        model[0].weight.grad, before = None, torch.get_rng_state()
        torch.empty((), dtype=torch.int64).random_()
        expected = torch.get_rng_state()
        torch.set_rng_state(before)
        loss = model.forward_backward((INPUTS.float(),), loss_fn=total, run_config=config)
        assert model[0].weight.grad.item() == pytest.approx(loss.item())
        assert torch.equal(expected, torch.get_rng_state())


def test_pipelines_made_on_one_line_draw_for_themselves(pipe):
    """The masks of two members differ in about half of the elements, and are the same again after the same seed."""

    def masks():
        torch.manual_seed(5)
        members = [pipe(nn.Sequential(nn.Identity(), nn.Dropout(0.5)).train(), devices="virtual:2") for _ in range(2)]
        return [member(torch.ones(12, 64)) for member in members]

    first, second = masks()
    assert 0.3 < (first != second).float().mean() < 0.7
    assert all(torch.equal(one, other) for one, other in zip(masks(), (first, second), strict=True))


def test_pipelines_of_several_threads_draw_for_themselves(pipe):
    both = threading.Barrier(2, timeout=30)

    class Waits(nn.Module):
        waits = False

        def forward(self, x):
            if self.waits:
                both.wait()
            return x

    def run(model):
        return model(torch.ones(12, 64), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))

    made = [pipe(nn.Sequential(Waits(), nn.Dropout(0.5)).train(), devices="virtual:1") for _ in range(2)]
    for model in made:  # what the layers do is known
        run(model)
    Waits.waits = True
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, made, timeout=60)
    assert 0.3 < (first != second).float().mean() < 0.7


def test_a_run_that_ends_meanwhile_is_not_taken_for_a_draw():
    class Waits(nn.Module):
        meanwhile = staticmethod(lambda: None)

        def forward(self):
            self.meanwhile()

    layer, again = Waits(), []
    generator = VisitGenerator(torch.device("cpu"))
    run_seeded(layer, layer, lambda: 1, generator, layer)
    for _ in range(2):  # from a state that is read, and from one that was kept from the call before
        run_seeded(layer, layer, lambda: 2, generator, lambda: again.append(1))
        layer.meanwhile = move_generator
        before = torch.get_rng_state()
        run_seeded(layer, layer, lambda: 3, generator, lambda: again.append(1))
        assert not torch.equal(before, torch.get_rng_state())
        layer.meanwhile = lambda: None
    assert again == []


def test_a_draw_on_another_device_during_the_comparison_counts(monkeypatch):
    """Otherwise torch's generator would stay where it is, and the next run would drop the same entries."""
    draws = Draws(base=1, tag="", in_order=False)

    class Device:
        is_compared = False

        def get_state(self):
            if self.is_compared:
                draws.has_drawn = True  # as the thread of the other device sets it
            return torch.zeros(1)

        def manual_seed(self, seed): ...

        def set_state(self, state): ...

    device = Device()
    monkeypatch.setattr(recomputed, "_generator_of", lambda _: device)
    generator = VisitGenerator(torch.device("cuda:0"), draws)
    generator.seed(lambda: 1)
    device.is_compared = True
    generator.restore()
    assert draws.has_drawn
    before = torch.get_rng_state()
    draws.commit()
    assert not torch.equal(before, torch.get_rng_state())


def test_only_the_module_of_the_lock_puts_the_generator_back():
    """Elsewhere what is put back could be the state of a layer that draws in another thread."""
    package = pathlib.Path(roundpipe_runtime.__file__).parent
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if "fork_rng(" in path.read_text()}
    assert found == {"device/worker.py"}


CPU = torch.device("cpu")


class Checkpointed(nn.Module):
    """A part with dropout that is called again in the backward."""

    def __init__(self, width, reentrant):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.Tanh(), nn.Linear(width, width))
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


def drawn_meanwhile(function, repeats, device=CPU):
    """Whether another thread could draw while `function` went backward, for each time that it does."""
    found, threads = [], []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            has_drawn = threading.Event()

            def draws():
                has_drawn.set()
                return torch.rand(1)

            thread = threading.Thread(target=lambda: run_seeded(draws, draws, lambda: 1, VisitGenerator(CPU), draws))
            threads.append(thread)
            thread.start()
            found.append(has_drawn.wait(0.2))
            return gradient

    for _ in range(repeats):
        entered = Look.apply(torch.ones(3, requires_grad=True))
        loss = watch_forward(lambda entered=entered: function(entered), function, device).sum()
        run_backward(loss.backward, function, device)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("device", [CPU, torch.device("cuda:0")], ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
def test_nobody_draws_while_a_checkpoint_goes_backward(reentrant, device):
    """No other thread draws, from the first backward; on an accelerator, the forward shows the checkpoint."""

    def function(x):
        return checkpoint(torch.sin, x * 2, use_reentrant=reentrant)

    assert drawn_meanwhile(function, 3, device) == [False, False, False]


@pytest.mark.parametrize(("device", "first"), [("cpu", False), ("cuda:0", True)])
def test_others_draw_while_a_plain_layer_goes_backward(device, first):
    """On the CPU from the second backward, since the first one shows that there is no checkpoint."""
    assert drawn_meanwhile(lambda x: torch.sin(x), 3, torch.device(device)) == [first, True, True]


def test_what_cannot_be_remembered_is_run_alone_and_a_forward_without_gradients_decides_nothing():
    """An object of slots takes no weak reference; models do not checkpoint without gradients."""

    class Loss:
        __slots__ = ()

        def __call__(self, x):
            return torch.sin(x)

    assert drawn_meanwhile(Loss(), 2) == [False, False]

    def function(x):
        return torch.sin(x)

    with torch.no_grad():
        watch_forward(lambda: function(torch.ones(1)), function, torch.device("cuda:0"))
    assert traits_of(function).reenters == {}


def test_an_error_in_the_first_backward_comes_out_and_decides_nothing():
    def fail():
        raise ArithmeticError

    def function(x):
        return checkpoint(torch.sin, x, use_reentrant=False)

    with pytest.raises(ArithmeticError):
        run_backward(fail, function, CPU)
    assert sys.getprofile() is None
    assert drawn_meanwhile(function, 2) == [False, False]


def test_a_profiler_of_the_users_is_not_replaced():
    """A profiler may change anything, so a backward runs alone while a profiler is on, or if it starts a profiler."""
    names = []

    def look(frame, event, argument):
        if event == "call":
            names.append(frame.f_code.co_name)

    def function(x):
        return checkpoint(torch.sin, x * 2, use_reentrant=False)

    def seen_in_backward(gradient):
        return gradient

    loss = function(torch.ones(3, requires_grad=True)).sum()
    loss.register_hook(lambda gradient: seen_in_backward(gradient))

    def other(x):
        return torch.sin(x)

    sys.setprofile(look)
    try:
        run_backward(loss.backward, function, CPU)
        assert sys.getprofile() is look
        sys.setprofile(None)
        run_backward(lambda: sys.setprofile(look), other, CPU)
        assert sys.getprofile() is look
    finally:
        sys.setprofile(None)
    assert "seen_in_backward" in names
    assert drawn_meanwhile(function, 2) == [False, False]
    assert drawn_meanwhile(other, 2) == [False, True]


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_in_a_checkpoint_is_the_same_on_any_number_of_devices(reentrant, monkeypatch):
    monkeypatch.setattr(planner, "_BRIEF", 0.0)  # a thread for each device, however brief the layers are
    width = 64

    def gradients(devices, seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(width, width), *[Checkpointed(width, reentrant) for _ in range(5)])
        config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=4)
        pipe = RoundPipe(model, devices=devices, model_run_config=config)
        inputs, labels = torch.randn(16, width), torch.randn(16, width)
        before = torch.get_rng_state()
        for _ in range(2):
            pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
        found = torch.get_rng_state()
        torch.set_rng_state(before)
        for _ in range(2):  # each run that draws moves it by one number
            torch.empty((), dtype=torch.int64).random_()
        assert torch.equal(torch.get_rng_state(), found)
        pipe.close()
        return [parameter.grad.clone() for parameter in model.parameters()]

    for seed in range(8):
        assert same_bits(gradients("virtual:3", seed), gradients("virtual:1", seed))


def test_a_draw_of_another_thread_is_not_taken_for_one_of_a_backward():
    """Devices that count memory show each operator of a backward: the demo's layers were called mixing, most times."""
    batches = list(demo._batches(1))
    for _ in range(3):
        needs = demo.measure_needs(demo._build(), batches, demo._loss_fn, demo.LIMIT, demo.DEVICES)
        assert needs.pipeline <= demo.LIMIT < needs.plain
