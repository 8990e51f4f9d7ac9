"""Calls of a pipeline: outputs, losses, packed data, and losses of the joined batch."""

import copy

import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipePackedData, RoundPipeRunConfig, WeightedLoss
from roundpipe_runtime.errors import ConfigError, JoinError, LossError, StageError
from tests.modules import Answers, module_of
from tests.runtime.small import MEAN, batch, near, near_gradients, small_model

F = nn.functional
MEAN_SUM = RoundPipeRunConfig(num_microbatch=3)


def test_an_rnn_and_its_flat_weights(wrap):
    """nn.LSTM keeps a list of its weights beside the parameters: it follows the copies."""
    torch.manual_seed(0)
    model = nn.LSTM(4, 5, batch_first=True)
    inputs = torch.randn(6, 3, 4)
    plain = copy.deepcopy(model)
    expected, _ = plain(inputs)
    expected.sum().backward()
    loss = wrap(model).forward_backward((inputs,), loss_fn=lambda outputs, _: outputs[0].sum(), run_config=MEAN_SUM)
    assert near(loss, expected.sum().detach())
    assert near_gradients(model, plain)


def test_no_grad_and_eval_give_plain_outputs(wrap):
    model = small_model(norm=True, dropout=0.5).eval()
    inputs, _ = batch(7)
    pipe = wrap(model)
    with torch.no_grad():
        found = pipe(inputs)
        assert pipe(inputs, roundpipe_run_config=RoundPipeRunConfig(requires_grad=True)).requires_grad
        with pytest.raises(ConfigError, match="Use forward"):
            pipe.forward_backward((inputs,))
    assert not found.requires_grad
    assert torch.allclose(found, model(inputs), atol=1e-6)
    assert not pipe(inputs, roundpipe_run_config=RoundPipeRunConfig(requires_grad=False)).requires_grad


def test_a_sequence_of_losses_is_a_list_of_totals(wrap):
    model, inputs, labels = small_model(), *batch(6)
    call = {"label": labels, "return_outputs": True, "run_config": MEAN_SUM}
    losses, returned = wrap(model).forward_backward(
        (inputs,), loss_fn=lambda o, t: [((o - t) ** 2).sum(), o.abs().sum()], **call
    )
    plain = small_model()
    outputs = plain(inputs)
    assert not returned.requires_grad
    assert torch.allclose(returned, outputs, atol=1e-6)
    expected = [((outputs - labels) ** 2).sum(), outputs.abs().sum()]
    torch.autograd.backward(expected)
    assert [near(a, b.detach()) for a, b in zip(losses, expected, strict=True)] == [True, True]
    assert near_gradients(model, plain)


def test_the_caller_s_autocast_holds_in_the_layers(wrap):
    model, inputs, _labels = small_model(), *batch(6)
    dtypes = []
    model[0].register_forward_hook(lambda m, a, out: dtypes.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(inputs)
        found = wrap(model)(inputs, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
    assert set(dtypes) == {torch.bfloat16}
    assert torch.equal(found, expected)


def test_a_backward_recomputes_from_what_the_inputs_were_and_refuses_other_weights(wrap):
    model, plain, (inputs, labels) = small_model(), small_model(), batch(6)
    F.mse_loss(plain(inputs), labels).backward()
    loss = F.mse_loss(wrap(model)(inputs), labels)
    inputs.zero_()
    loss.backward()
    assert near_gradients(model, plain)
    loss = wrap(model)(inputs).sum()
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(StageError, match=r"layer 0 \(Linear\) was changed between"):
        loss.backward()


def test_pipelines_are_chained_by_packed_data(wrap):
    model, plain, (inputs, labels) = small_model(), small_model(), batch(7)
    inputs.requires_grad_()
    F.mse_loss(plain(inputs), labels).backward()
    exact, inputs.grad = inputs.grad, None
    first, second = wrap(model[:3]), wrap(model[3:])
    hidden = first(inputs, roundpipe_run_config=RoundPipeRunConfig(merge_output=False, num_microbatch=3))
    assert isinstance(hidden, RoundPipePackedData)
    assert [len(part) for part in hidden.synchronize()] == [3, 2, 2]
    second.forward_backward((hidden,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    assert near_gradients(model, plain)
    assert near(inputs.grad, exact)


@pytest.mark.parametrize("clone", [False, True])
def test_a_table_beside_packed_data_of_a_split_function_goes_whole(wrap, clone):
    """(2, 6) four times, and a (5, 6) table for all: not five rows, cut 2, 1, 1, 1. Gradients reach the first."""
    torch.manual_seed(0)
    first_model, second_model = (
        module_of(lambda self, x, table: self.linear(x) * table.sum(0), linear=nn.Linear(6, 6)).train() for _ in "ab"
    )
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

    model = Answers(lambda x: {"low" if x.sum() < 0 else "high": x})
    config = RoundPipeRunConfig(num_microbatch=2, merge_output=False)
    with pytest.raises(JoinError, match="low"), torch.no_grad():
        wrap(model)(torch.cat([-torch.ones(2, 2), torch.ones(2, 2)]), roundpipe_run_config=config)


ROWS = 7
JOINED = RoundPipeRunConfig(num_microbatch=3, loss_reduction="joined")


def contrast():
    """Each row is to be like the row of the same number, and unlike all others."""
    scale = torch.tensor(2.0, dtype=torch.float64)
    return module_of(lambda self, x, y: F.cross_entropy(self.scale * x @ y.T, torch.arange(len(x))), scale=scale)


def made():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return plain, torch.randn(ROWS, 4, dtype=torch.float64), torch.randn(ROWS, 3, dtype=torch.float64)


@pytest.mark.parametrize("optim_dtype", [None, torch.float64])
def test_loss_and_gradients_are_those_of_the_plain_model(optim_dtype):
    plain, x, y = made()
    loss_fn = contrast()
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


def test_a_loss_that_cannot_be_joined_changes_no_gradient():
    """A process of a mesh does not see the rows of the others."""
    model, x, y = made()
    pipeline = RoundPipe(model, devices="virtual:2")
    with pytest.raises(LossError, match="loss_fn must return"):
        pipeline.forward_backward((x,), label=y, loss_fn=lambda *_: "loss", run_config=JOINED)
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(LossError, match="each process of a mesh has only some of them"):
        RoundPipe(model, devices="virtual:2", replicas=2).forward_backward(
            (x,), label=y, loss_fn=contrast(), run_config=JOINED
        )


def of_pairs(outputs, labels):
    return (outputs[:, None] - outputs[None]).pow(2).mean()


LOSSES = {
    "a sum as a mean": (lambda out, y: (out - y).abs().sum(), "mean"),
    "pairs": (of_pairs, "mean"),
    "pairs, added": (of_pairs, "sum"),
    "pairs as a sum with its weight": (lambda out, y: WeightedLoss(of_pairs(out, y) * len(out), len(out)), "sum"),
    "a mean with a weight of one": (lambda out, y: WeightedLoss(F.mse_loss(out, y), 1), "sum"),
    "a root": (lambda out, y: F.mse_loss(out, y).sqrt(), "mean"),
    "two, of which one is wrong": (lambda out, y: [F.mse_loss(out, y), of_pairs(out, y)], "mean"),
}


@pytest.mark.parametrize("microbatches", [2, 3, ROWS])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_not_what_its_reduction_states_is_refused(name, microbatches):
    loss_fn, reduction = LOSSES[name]
    model, x, y = made()
    config = RoundPipeRunConfig(num_microbatch=microbatches, loss_reduction=reduction)
    with pytest.raises(LossError, match=r'(?s)loss_fn returns .* for \d rows, and .*loss_reduction="joined"'):
        RoundPipe(model, devices="virtual:2").forward_backward((x,), label=y, loss_fn=loss_fn, run_config=config)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_is_checked_once_and_for_several_microbatches():
    """Made anew in each step, as in a loop of a script, it is called once per microbatch from the second run on."""
    model, x, y = made()
    plain = copy.deepcopy(model)
    pipeline = RoundPipe(model, devices="virtual:2")
    loss = pipeline.forward_backward((x,), label=y, loss_fn=of_pairs, run_config=RoundPipeRunConfig(num_microbatch=1))
    assert loss.item() == pytest.approx(of_pairs(plain(x), y).item(), rel=1e-12)
    calls, counts = [], []
    for _ in range(3):
        calls.clear()
        pipeline.forward_backward(
            (x,), label=y, loss_fn=lambda out, y: calls.append(1) or F.mse_loss(out, y), run_config=MEAN
        )
        counts.append(len(calls))
    assert counts[1:] == [3, 3]
