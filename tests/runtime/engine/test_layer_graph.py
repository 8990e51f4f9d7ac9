"""Layers get the leaves of their graph where they leave their inputs alone, and may write them in place elsewhere."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig, StageError
from roundpipe_runtime.engine.draws import traits_of
from roundpipe_runtime.engine.layer_graph import LayerGraph
from tests.runtime.small import batch, gradients, relative_error, without_row_check

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)


class Late(nn.Linear):
    """Writes its input in place from its third call on."""

    calls = 0
    counts = False

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        if self.counts:
            self.seen += 1
        return super().forward(x.mul_(2) if self.calls > 2 else x * 2)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Late(), nn.Linear(4, 3))


def train(wrapped, inputs, labels):
    wrapped.zero_grad()
    return wrapped.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)


def test_a_layer_that_leaves_its_input_alone_gets_the_leaf(devices):
    seen = {0: [], 1: []}
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    inputs, labels = batch(6)
    for number in seen:
        layers[number + 1].register_forward_pre_hook(lambda m, args, n=number: seen[n].append(args[0].is_leaf))
    wrapped = without_row_check(RoundPipe(layers, devices=devices, model_run_config=MEAN))
    for _ in range(2):
        train(wrapped, inputs, labels)
    assert not any(seen[0])
    assert seen[1][0] is False
    assert all(seen[1][-3:])
    assert traits_of(layers[1]).mutates_inputs[True] is True
    assert traits_of(layers[2]).mutates_inputs[True] is False


def test_a_layer_may_begin_to_write_its_input(devices):
    """torch refuses the write of a leaf; the call is repeated with a tensor that can be written."""
    inputs, labels = batch(6)
    expected = model()
    F.mse_loss(expected(inputs), labels).backward()
    found = model()
    wrapped = RoundPipe(found, devices=devices, model_run_config=MEAN)
    for _ in range(2):
        train(wrapped, inputs, labels)
    assert found[1].calls > 3
    exact = gradients(expected)
    assert all(relative_error(p.grad, exact[name]) < 1e-6 for name, p in found.named_parameters())


def test_it_may_not_when_the_call_cannot_be_repeated(devices):
    """It wrote a buffer before: an error says so, and the next call is right."""
    inputs, labels = batch(6)
    found = model()
    found[1].counts = True
    wrapped = without_row_check(RoundPipe(found, devices=devices, model_run_config=MEAN))

    def twice():
        train(wrapped, inputs, labels)
        train(wrapped, inputs, labels)

    with pytest.raises(StageError, match=r"layer 1 \(Late\) had to write its input in place"):
        twice()
    found[1].counts = False
    train(wrapped, inputs, labels)


def test_an_error_of_the_layer_s_own_is_not_taken_for_that(devices):
    class Own(nn.Linear):
        broken = False

        def forward(self, x):
            if self.broken:
                self.weight.add_(1)
            return super().forward(x)

    inputs, labels = batch(6)
    layers = nn.Sequential(nn.Linear(4, 4), Own(4, 3))
    wrapped = RoundPipe(layers, devices=devices, model_run_config=MEAN)
    train(wrapped, inputs, labels)
    layers[1].broken = True
    with pytest.raises(RuntimeError, match="leaf Variable"):
        train(wrapped, inputs, labels)


def test_where_no_gradient_flows_nothing_is_run():
    """A frozen layer, or an output that nobody used: what its backward would do stays unknown."""
    leaf = torch.ones(2, requires_grad=True)
    calls = []

    def run(call):
        calls.append(call)
        call()

    assert LayerGraph(0, [None], [torch.ones(2)]).backward([torch.ones(2)], run) == [None]
    assert LayerGraph(0, [leaf], [leaf * 2]).backward([None], run) == [None]
    assert calls == []
    (found,) = LayerGraph(0, [leaf], [leaf * 2]).backward([torch.ones(2)], run)
    assert found.tolist() == [2.0, 2.0]
    assert len(calls) == 1
