"""Losses that compare rows with each other: computed once, of the joined outputs of all microbatches."""

import copy
import warnings

import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig, RoundPipeWarning, WeightedLoss
from roundpipe_runtime.errors import LossError
from tests.runtime.small import near_gradients

ROWS = 7
JOINED = RoundPipeRunConfig(num_microbatch=3, loss_reduction="joined")


class Contrast(nn.Module):
    """Each row is to be like the row of the same number, and unlike all others."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, outputs, labels):
        return nn.functional.cross_entropy(self.scale * outputs @ labels.T, torch.arange(len(outputs)))


def made():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return plain, torch.randn(ROWS, 4, dtype=torch.float64), torch.randn(ROWS, 3, dtype=torch.float64)


@pytest.mark.parametrize("optim_dtype", [None, torch.float64])
def test_loss_and_gradients_are_those_of_the_plain_model(optim_dtype):
    plain, x, y = made()
    loss_fn = Contrast()
    model, own = copy.deepcopy(plain), copy.deepcopy(loss_fn)
    entered, given = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = loss_fn(plain(entered), y)
    expected.backward()
    pipeline = RoundPipe(model, devices="virtual:2", optim_dtype=optim_dtype)
    loss, outputs = pipeline.forward_backward((given,), label=y, loss_fn=own, return_outputs=True, run_config=JOINED)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(outputs, plain(x), rtol=1e-12)
    assert near_gradients(pipeline.optim_parameters(), plain, rtol=1e-12, atol=1e-15)
    assert own.scale.grad.item() == pytest.approx(loss_fn.scale.grad.item(), rel=1e-12)
    assert torch.allclose(given.grad, entered.grad, rtol=1e-12, atol=1e-15)


def test_sums_with_weights_and_lists_are_read_as_ever():
    plain, x, y = made()
    model = copy.deepcopy(plain)
    pipeline = RoundPipe(model, devices="virtual:2")
    pair = pipeline.forward_backward(
        (x,), label=y, loss_fn=lambda out, y: WeightedLoss((out - y).abs().sum(), y.numel()), run_config=JOINED
    )
    (plain(x) - y).abs().mean().backward()
    assert pair.item() == pytest.approx((plain(x) - y).abs().mean().item(), rel=1e-12)
    assert torch.allclose(model[0].weight.grad, plain[0].weight.grad, rtol=1e-12)
    several = pipeline.forward_backward((x,), label=y, loss_fn=lambda out, y: [out.std(), y.std()], run_config=JOINED)
    assert [loss.item() for loss in several] == pytest.approx([plain(x).std().item(), y.std().item()], rel=1e-12)


def test_a_wrong_loss_changes_no_gradient():
    model, x, y = made()
    pipeline = RoundPipe(model, devices="virtual:2")
    with pytest.raises(LossError, match="loss_fn must return"):
        pipeline.forward_backward((x,), label=y, loss_fn=lambda *_: "loss", run_config=JOINED)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_processes_with_rows_of_their_own_refuse_it():
    """A process of a mesh does not see the rows of the others."""
    model, x, y = made()
    pipeline = RoundPipe(model, devices="virtual:2", replicas=2)
    with pytest.raises(LossError, match="each process of a mesh has only some of them"):
        pipeline.forward_backward((x,), label=y, loss_fn=Contrast(), run_config=JOINED)


MSE = nn.functional.mse_loss


def of_pairs(outputs, labels):
    """Each row is compared with all others."""
    return (outputs[:, None] - outputs[None]).pow(2).mean()


LOSSES = {
    "a mean": (MSE, "mean", True),
    "a mean, added": (MSE, "sum", True),
    "a sum": (lambda out, y: (out - y).abs().sum(), "sum", True),
    "a sum as a mean": (lambda out, y: (out - y).abs().sum(), "mean", False),
    "pairs": (of_pairs, "mean", False),
    "pairs, added": (of_pairs, "sum", False),
    "pairs as a sum with its weight": (
        lambda out, y: WeightedLoss(of_pairs(out, y) * len(out), len(out)),
        "sum",
        False,
    ),
    "a sum with its weight": (lambda out, y: WeightedLoss((out - y).abs().sum(), out.numel()), "sum", True),
    "a mean with a weight of one": (lambda out, y: WeightedLoss(MSE(out, y), 1), "sum", False),
    "a root": (lambda out, y: MSE(out, y).sqrt(), "mean", False),
    "two, of which one is wrong": (lambda out, y: [MSE(out, y), of_pairs(out, y)], "mean", False),
    "noise": (lambda out, y: (torch.rand_like(out) * out).mean(), "mean", True),
}


@pytest.mark.parametrize("microbatches", [2, 3, ROWS])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_not_what_its_reduction_states_is_refused(name, microbatches):
    loss_fn, reduction, is_right = LOSSES[name]
    model, x, y = made()
    pipeline = RoundPipe(model, devices="virtual:2")
    config = RoundPipeRunConfig(num_microbatch=microbatches, loss_reduction=reduction)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoundPipeWarning)  # a sum over an uneven split
        if is_right:
            pipeline.forward_backward((x,), label=y, loss_fn=loss_fn, run_config=config)
        else:
            with pytest.raises(LossError, match=r'(?s)loss_fn returns .* for \d rows, and .*loss_reduction="joined"'):
                pipeline.forward_backward((x,), label=y, loss_fn=loss_fn, run_config=config)
            assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_is_checked_once():
    """Made anew in each step, as in a loop of a script, it is called once per microbatch from the second run on."""
    model, x, y = made()
    pipeline = RoundPipe(model, devices="virtual:2")
    calls = []
    counts = []
    for _ in range(3):
        before = len(calls)
        pipeline.forward_backward(
            (x,),
            label=y,
            loss_fn=lambda out, y: calls.append(1) or MSE(out, y),
            run_config=RoundPipeRunConfig(num_microbatch=3, loss_reduction="mean"),
        )
        counts.append(len(calls) - before)
    assert counts[1:] == [3, 3]


def test_one_microbatch_is_not_checked():
    """Its loss is that of the batch, whatever it compares."""
    model, x, y = made()
    plain = copy.deepcopy(model)
    pipeline = RoundPipe(model, devices="virtual:2")
    config = RoundPipeRunConfig(num_microbatch=1)
    loss = pipeline.forward_backward((x,), label=y, loss_fn=of_pairs, run_config=config)
    assert loss.item() == pytest.approx(of_pairs(plain(x), y).item(), rel=1e-12)
