"""What a run measures, and what follows from it."""

import threading
import time
from typing import ClassVar

import pytest
import torch
from torch import nn

from roundpipe_runtime import ModelExecutePlan, RoundPipeRunConfig
from roundpipe_runtime.engine import planner
from tests.runtime.small import batch, same_bits, small_model

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)


def test_the_plan_follows_what_was_measured(wrap):
    pipe = wrap(small_model())
    guessed = [cost.forward for cost in pipe.layer_costs()]
    inputs, labels = batch(6)
    for _ in range(3):
        pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    measured = [cost.forward for cost in pipe.layer_costs()]
    assert max(measured) < 1 < min(guessed)
    assert isinstance(ModelExecutePlan.auto("fused", pipe), ModelExecutePlan)


def test_a_forward_alone_says_nothing_about_training(wrap):
    """One row in inference is quicker than a batch; the plan for training compares what was measured in training."""
    pipe = wrap(small_model())
    inputs, labels = batch(6)
    pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    before = pipe.layer_costs()
    for _ in range(3):
        with torch.no_grad():
            pipe(inputs[:1])
    assert pipe.layer_costs() == before


def test_the_fused_stage_is_measured(wrap):
    """Its backward costs what a backward stage would: the forward, the loss, and the way back through both."""
    model, plan = small_model(), ModelExecutePlan([range(6)], [range(6, 7), range(6)])
    pipe, (inputs, labels) = wrap(model), batch(6)
    model[6].register_forward_hook(lambda *_: time.sleep(0.01))

    def slow_loss(outputs, targets):
        time.sleep(0.1)
        return F.mse_loss(outputs, targets)

    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3, execute_plan=plan)
    pipe.forward_backward((inputs,), label=labels, loss_fn=slow_loss, run_config=config)
    last = pipe.layer_costs()[6]
    assert last.forward >= 0.01
    assert last.backward >= 0.11


class _Watched(nn.Linear):
    """Notes in which threads its kind computes."""

    threads: ClassVar[set[int]] = set()

    def forward(self, x):
        if torch.is_grad_enabled():  # and not of rows that are tried
            self.threads.add(threading.get_ident())
        return super().forward(x)


@pytest.mark.parametrize(("brief", "threads"), [(1.0, 1), (0.0, 2)])
def test_one_thread_computes_brief_layers(wrap, monkeypatch, brief, threads):
    monkeypatch.setattr(planner, "_BRIEF", brief)
    torch.manual_seed(0)
    model = nn.Sequential(*[_Watched(8, 8) for _ in range(6)])
    pipe, inputs, labels = wrap(model), torch.randn(6, 8), torch.randn(6, 8)

    def step():
        _Watched.threads.clear()
        pipe.zero_grad()
        loss = pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
        return [loss, *(parameter.grad.clone() for parameter in model.parameters())]

    first = step()
    assert len(_Watched.threads) == 2
    for _ in range(5):
        assert same_bits(step(), first)
        assert len(_Watched.threads) == threads
