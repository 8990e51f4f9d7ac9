"""Copies of the last stage on several devices: the same bits as on one, for any number of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundpipe_runtime import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, StageError, WeightedLoss
from roundpipe_runtime.timeline import Timeline
from tests.cases import examples
from tests.runtime.engine.test_stage import Criterion
from tests.runtime.small import batch, checked_devices, cut_plan, same_bits, small_model, state

F = nn.functional


@pytest.fixture(scope="module")
def devices():
    """Four devices that check every access."""
    with checked_devices(4) as made:
        yield made


class Reentrant(nn.Module):
    """A layer whose backward reaches its weight twice: once in each of its checkpoints."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return checkpoint(self.inner, checkpoint(self.inner, x, use_reentrant=True), use_reentrant=True)


def make_model(*, tied, dropout=0.0):
    """The small model; ``tied``: one layer has the weight of an earlier stage, and one goes back in two parts."""
    model = small_model(tied=True, dropout=dropout)
    if tied:
        last = type(model[2])(model[2].weight)
        return nn.Sequential(*model[:4], Reentrant(), last, nn.Linear(6, 3))
    return model


def weighted(outputs, labels):
    return WeightedLoss((outputs - labels).square().sum(), labels.shape[0] * 3)


LOSSES = {"sum": F.mse_loss, "mean": F.mse_loss, "pair": weighted}


def trained(devices, copies, case, *, model=None, loss_fn=None):
    """Losses and everything that two steps leave, the first of two accumulated calls."""
    model = make_model(tied=case["tied"], dropout=case["dropout"]) if model is None else model
    plan = cut_plan(len(model), [2], [3], case["fused"])
    plan.last_stage_copies = copies
    config = RoundPipeRunConfig(
        num_microbatch=case["microbatches"],
        execute_plan=plan,
        loss_reduction="sum" if case["loss"] == "sum" else "mean",
    )
    pipe = RoundPipe(
        model, optim_dtype=case["optim_dtype"], devices=devices[: case["devices"]], model_run_config=config
    )
    pipe._rp_engine.planner.prefers_one_thread = lambda kind: case["one_thread"]
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1, momentum=0.9)
    inputs, labels = batch(case["rows"])
    found = []
    for calls in (2, 1):
        for _ in range(calls):
            loss = loss_fn or LOSSES[case["loss"]]
            total, outputs = pipe.forward_backward((inputs,), label=labels, loss_fn=loss, return_outputs=True)
            found += [total, outputs]
        found += [parameter.grad.clone() for parameter in pipe.optim_parameters() if parameter.grad is not None]
        pipe.step(optimizer.step, is_async=case["is_async"])
    pipe.synchronize()
    return [*found, *state(model), *(parameter.detach().clone() for parameter in model.parameters())]


CASE = {
    "rows": 11,
    "microbatches": 5,
    "devices": 4,
    "fused": 2,
    "tied": False,
    "dropout": 0.0,
    "loss": "mean",
    "optim_dtype": None,
    "is_async": False,
    "one_thread": False,
}


@pytest.mark.parametrize(
    ("copies", "changes"),
    [
        (2, {"tied": True, "optim_dtype": torch.float64, "is_async": "exact", "fused": 3}),
        (3, {"dropout": 0.3, "loss": "pair", "is_async": True}),
        (4, {"optim_dtype": torch.bfloat16, "one_thread": True}),
    ],
)
def test_copies_change_no_bit(devices, copies, changes):
    case = {**CASE, **changes}
    assert same_bits(trained(devices, copies, case), trained(devices, 1, case))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::roundpipe_runtime.errors.UnevenSplitWarning")
@settings(max_examples=examples(25))
@given(
    case=st.fixed_dictionaries(
        {
            "rows": st.integers(5, 13),
            "microbatches": st.integers(1, 7),
            "devices": st.integers(1, 4),
            "fused": st.integers(1, 3),
            "tied": st.booleans(),
            "dropout": st.sampled_from([0.0, 0.3]),
            "loss": st.sampled_from(sorted(LOSSES)),
            "optim_dtype": st.sampled_from([None, torch.float64, torch.bfloat16]),
            "is_async": st.sampled_from([False, True, "exact"]),
            "one_thread": st.booleans(),
        }
    ),
    copies=st.integers(2, 4),
)
def test_copies_change_no_bit_in_any_case(devices, case, copies):
    assert same_bits(trained(devices, copies, case), trained(devices, 1, case))


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_a_plain_loop_over_microbatches(devices, copies, tied):
    """Bit by bit, where each layer has its own weight: the sum of a weight of two layers has another order."""
    model, plain = make_model(tied=tied), make_model(tied=tied)
    inputs, labels = batch(10)
    for rows, own in zip(inputs.split(2), labels.split(2), strict=True):
        (plain(rows) - own).square().sum().backward()
    plan = cut_plan(len(model), [2], [3], 3)
    plan.last_stage_copies = copies
    pipe = RoundPipe(model, devices=devices)
    config = RoundPipeRunConfig(num_microbatch=5, execute_plan=plan)
    pipe.forward_backward((inputs,), label=labels, loss_fn=lambda o, y: (o - y).square().sum(), run_config=config)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        if found is model[2].weight:
            torch.testing.assert_close(found.grad, expected.grad)
        else:
            assert torch.equal(found.grad, expected.grad)


def test_each_copy_takes_its_microbatches(devices):
    plan = ModelExecutePlan([range(6)], [range(6, 7), range(6)], last_stage_copies=3)
    inputs, labels = batch(5)
    pipe = RoundPipe(make_model(tied=False), devices=devices)
    config = RoundPipeRunConfig(num_microbatch=5, execute_plan=plan)
    with Timeline() as timeline:
        pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
    ran = {(one.device, one.microbatch) for one in timeline.records if one.kind == "backward" and one.layer == 6}
    names = [device.name for device in devices[1:]]
    assert ran == {(names[microbatch % 3], microbatch) for microbatch in range(5)}


def test_what_the_loss_trains_is_added_in_order(devices):
    found = []
    for copies in (1, 3):
        model = make_model(tied=False)
        criterion = Criterion(model[0].weight, pair=True)
        found.append([*trained(devices, copies, CASE, model=model, loss_fn=criterion), criterion.temperature.grad])
    assert same_bits(*found)


@pytest.mark.parametrize("failing", range(5))
def test_an_error_in_one_copy_leaves_nothing(devices, failing):
    """It is the error of the caller's own code with its place, no gradient stays, and the next call succeeds.

    A loss that does not run on the first rows, on which its reduction is shown, is called with all rows at once.
    """
    model = make_model(tied=False)
    plan = cut_plan(len(model), [2], [3], 2)
    plan.last_stage_copies = 3
    inputs, labels = batch(5)
    labels[failing] = torch.nan

    def loss_fn(outputs, labels):
        if labels.isnan().any():
            raise ValueError("not a number")
        return F.mse_loss(outputs, labels)

    pipe = RoundPipe(model, devices=devices)
    config = RoundPipeRunConfig(num_microbatch=5, execute_plan=plan)
    with pytest.raises(ValueError, match="not a number") as caught:
        pipe.forward_backward((inputs,), label=labels, loss_fn=loss_fn, run_config=config)
    place = "all rows: tensors float32(5, 3), float32(5, 3)" if failing < 3 else f"microbatch {failing} of 5"
    assert any(place in note for note in caught.value.__notes__)
    assert all(parameter.grad is None for parameter in model.parameters())
    pipe.forward_backward((inputs,), label=torch.zeros_like(labels), loss_fn=loss_fn, run_config=config)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_layer_that_writes_a_buffer_is_refused(devices):
    """What a copy counts would miss the microbatches of the others; nothing is written. In eval it writes none."""

    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            if self.training:
                self.seen += 1
            return super().forward(x)

    model = nn.Sequential(nn.Linear(4, 6), Counting())
    plan = ModelExecutePlan([range(1)], [range(1, 2), range(1)], last_stage_copies=2)
    inputs, labels = batch(8)
    before = [buffer.clone() for buffer in model.buffers()]
    pipe = RoundPipe(model, devices=devices)
    config = RoundPipeRunConfig(num_microbatch=4, execute_plan=plan)
    with pytest.raises(StageError, match=r"layer 1 \(Counting\) wrote its buffer 'seen'.*\n.*last_stage_copies=1"):
        pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
    assert all(map(torch.equal, before, model.buffers()))
    assert all(parameter.grad is None for parameter in model.parameters())
    pipe.eval()
    pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
    assert model[0].weight.grad is not None


def test_a_sparse_gradient_is_added_like_a_dense_one(devices):
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 3, sparse=True)

        def forward(self, x):
            return x + self.table(x.detach().abs().long() % 6)[:, 0]

    found = []
    for copies in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), Lookup())
        plan = ModelExecutePlan([range(1)], [range(1, 2), range(1)], last_stage_copies=copies)
        inputs, labels = batch(8)
        pipe = RoundPipe(model, devices=devices)
        config = RoundPipeRunConfig(num_microbatch=4, execute_plan=plan)
        pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
        found.append([parameter.grad.to_dense() for parameter in model.parameters()])
    assert same_bits(*found)


def test_a_computed_plan_copies_a_heavy_head(devices):
    """``last_stage_copies`` of the configuration; "auto" finds that it pays for a head of half the model."""
    inputs, labels = torch.ones(8, 8), torch.ones(8, 64)
    stages, found = [], []
    for copies in (1, 2, "auto"):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], nn.Linear(8, 64))
        pipe = RoundPipe(model, devices=devices)
        config = RoundPipeRunConfig(num_microbatch=8, last_stage_copies=copies)
        with Timeline() as timeline:
            pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
        stages.append({one.stage for one in timeline.records if one.kind == "backward" and one.layer == 4})
        found.append([parameter.grad for parameter in model.parameters()])
    assert [len(one) for one in stages[:2]] == [1, 2]
    assert len(stages[2]) > 1
    assert same_bits(found[1], found[0])
    assert same_bits(found[2], found[0])
