"""Pipelines chained by their microbatches."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import ConfigError, JoinError, RoundPipePackedData, RoundPipeRunConfig
from tests.runtime.small import batch, gradients, near, small_model

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)


def test_pipelines_are_chained_by_packed_data(wrap):
    model, inputs, labels = small_model(), *batch(7)
    inputs.requires_grad_()
    F.mse_loss(model(inputs), labels).backward()
    exact, exact_input = gradients(model), inputs.grad
    model.zero_grad()
    inputs.grad = None
    first, second = wrap(model[:3]), wrap(model[3:])
    hidden = first(inputs, roundpipe_run_config=RoundPipeRunConfig(merge_output=False, num_microbatch=3))
    assert isinstance(hidden, RoundPipePackedData)
    assert [len(part) for part in hidden.synchronize()] == [3, 2, 2]
    second.forward_backward((hidden,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    assert all(near(p.grad, exact[name]) for name, p in model.named_parameters())
    assert near(inputs.grad, exact_input)


class Table(nn.Module):
    """A layer with a table that every row reads whole."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, table):
        return self.linear(x) * table.sum(0)


@pytest.mark.parametrize("clone", [False, True])
def test_a_table_beside_packed_data_of_a_split_function_goes_whole(wrap, clone):
    """(2, 6) four times, and a (5, 6) table for all: not five rows, cut 2, 1, 1, 1. Gradients reach the first."""
    torch.manual_seed(0)
    first_model, second_model = Table(), Table()
    x, table = torch.randn(8, 6), torch.randn(5, 6)
    expected = second_model(first_model(x, table), table).pow(2).sum()
    expected.backward()
    exact = [parameter.grad for model in (first_model, second_model) for parameter in model.parameters()]
    first_model.zero_grad()
    second_model.zero_grad()

    def cut(args, kwargs, count):
        x, table = args
        return [(part, table.clone() if clone else table) for part in x.split(2)], [kwargs] * 4

    first, second = wrap(first_model), wrap(second_model)
    config = RoundPipeRunConfig(split_input=cut, merge_output=False, num_microbatch=4)
    hidden = first(x, table, roundpipe_run_config=config)
    assert hidden.rows == (2, 2, 2, 2)
    for given in (hidden, RoundPipePackedData(part.detach() for part in hidden)):  # the second does not tell its rows
        loss = second.forward_backward(
            (given, table), loss_fn=lambda o, t: o.pow(2).sum(), run_config=RoundPipeRunConfig(num_microbatch=4)
        )
        assert near(loss, expected.detach())
        if given is hidden:
            found = [parameter.grad for model in (first_model, second_model) for parameter in model.parameters()]
            assert all(near(a, b) for a, b in zip(found, exact, strict=True))


def test_packed_outputs_of_different_keys_are_refused(wrap):
    """They would all have the key of the first."""

    class Keys(nn.Module):
        def forward(self, x):
            return {"low" if x.sum() < 0 else "high": x}

    config = RoundPipeRunConfig(num_microbatch=2, merge_output=False)
    with pytest.raises(JoinError, match="low"), torch.no_grad():
        wrap(Keys())(torch.cat([-torch.ones(2, 2), torch.ones(2, 2)]), roundpipe_run_config=config)


def test_packed_labels_that_want_a_gradient_are_refused(wrap):
    """As tensors are: it would be lost without a word."""
    teacher, student, inputs = wrap(small_model()), wrap(small_model()), batch(4)[0]
    config = RoundPipeRunConfig(num_microbatch=2, merge_output=False)
    with pytest.raises(ConfigError, match="label requires a gradient"):
        student.forward_backward((inputs,), label=teacher(inputs, roundpipe_run_config=config), loss_fn=F.mse_loss)
    with torch.no_grad():
        labels = teacher(inputs, roundpipe_run_config=config)
    loss = student.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    assert near(loss, torch.zeros(()))
