"""Layers with `torch.utils.checkpoint` inside have the generator of the CPU for themselves when they go backward."""

import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
from roundpipe_runtime.cli import demo
from roundpipe_runtime.engine import planner
from roundpipe_runtime.engine.draws import traits_of
from roundpipe_runtime.engine.layer_graph import run_backward, watch_forward
from roundpipe_runtime.engine.recomputed import VisitGenerator, run_seeded

CPU = torch.device("cpu")
F = nn.functional


class Checkpointed(nn.Module):
    """A part with dropout that is called again in the backward."""

    def __init__(self, width, reentrant):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.Tanh(), nn.Linear(width, width))
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


class Draws(nn.Module):
    """Draws, and says when it has."""

    def __init__(self):
        super().__init__()
        self.has_drawn = threading.Event()

    def forward(self):
        self.has_drawn.set()
        return torch.rand(1)


def drawn_meanwhile(function, repeats, device=CPU):
    """Whether another thread could draw while `function` went backward, for each time that it does."""
    found = []
    threads = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            draws = Draws()
            thread = threading.Thread(target=lambda: run_seeded(draws, draws, lambda: 1, VisitGenerator(CPU), draws))
            threads.append(thread)
            thread.start()
            found.append(draws.has_drawn.wait(0.2))
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


def test_a_forward_without_gradients_decides_nothing():
    """Models do not checkpoint there."""

    def function(x):
        return torch.sin(x)

    with torch.no_grad():
        watch_forward(lambda: function(torch.ones(1)), function, torch.device("cuda:0"))
    assert traits_of(function).reenters == {}


def test_what_cannot_be_remembered_is_run_alone():
    """An object of slots takes no weak reference."""

    class Loss:
        __slots__ = ()

        def __call__(self, x):
            return torch.sin(x)

    assert drawn_meanwhile(Loss(), 2) == [False, False]


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
    """It sees the whole backward, and is there afterwards; the backward is run alone, as nobody knows what it does."""
    names = []

    def look(frame, event, argument):
        if event == "call":
            names.append(frame.f_code.co_name)

    def function(x):
        return checkpoint(torch.sin, x * 2, use_reentrant=False)

    loss = function(torch.ones(3, requires_grad=True)).sum()
    loss.register_hook(lambda gradient: seen_in_backward(gradient))

    def seen_in_backward(gradient):
        return gradient

    sys.setprofile(look)
    try:
        run_backward(loss.backward, function, CPU)
        assert sys.getprofile() is look
    finally:
        sys.setprofile(None)
    assert "seen_in_backward" in names
    assert drawn_meanwhile(function, 2) == [False, False]


def test_a_profiler_that_starts_meanwhile_stays():
    def look(frame, event, argument):
        pass

    def backward():
        sys.setprofile(look)

    def function(x):
        return torch.sin(x)

    try:
        run_backward(backward, function, CPU)
        assert sys.getprofile() is look
    finally:
        sys.setprofile(None)
    assert drawn_meanwhile(function, 2) == [False, True]


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
        return [parameter.grad for parameter in model.parameters()]

    for seed in range(8):
        for found, expected in zip(gradients("virtual:3", seed), gradients("virtual:1", seed), strict=True):
            assert torch.equal(found, expected)


def test_a_draw_of_another_thread_is_not_taken_for_one_of_a_backward():
    """Devices that count memory show each operator of a backward: the demo's layers were called mixing, most times."""
    batches = list(demo._batches(1))
    for _ in range(3):
        needs = demo.measure_needs(demo._build(), batches, demo._loss_fn, demo.LIMIT, demo.DEVICES)
        assert needs.pipeline <= demo.LIMIT < needs.plain
