"""A stage on its device, and copies of the last stage on several."""

import collections
import copy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundpipe_runtime import ModelExecutePlan, Replicate, RoundPipe, RoundPipeRunConfig, VirtualDevice, WeightedLoss
from roundpipe_runtime.errors import StageError
from roundpipe_runtime.schedule.timeline import Timeline
from tests.cases import examples
from tests.modules import module_class
from tests.runtime.small import MEAN, batch, cut_plan, near_gradients, same_bits, small_model, state, without_row_check

F = nn.functional


class Criterion(nn.Module):
    """A loss with a temperature that it learns, and a penalty on a weight of the model."""

    def __init__(self, weight, *, pair):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.penalised = [weight]
        self.pair = pair

    def forward(self, outputs, labels):
        squares = (self.temperature * outputs - labels).square()
        penalty = self.penalised[0].square().sum()
        if self.pair:
            return WeightedLoss(squares.sum() + penalty * outputs.numel(), outputs.numel())
        return squares.mean() + penalty


def weighted(outputs, labels):
    return WeightedLoss((outputs - labels).square().sum(), labels.shape[0] * 3)


@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_loss_learns_with_the_model(wrap, pair, dtype):
    model = small_model()
    plain = copy.deepcopy(model)
    inputs, labels = batch(10)
    criterion, expected = Criterion(model[0].weight, pair=pair), Criterion(plain[0].weight, pair=False)
    expected(plain(inputs), labels).backward()
    pipe = wrap(model, dtype, model_run_config=MEAN)
    pipe.forward_backward((inputs,), label=labels, loss_fn=criterion)
    assert near_gradients(criterion, expected)
    assert near_gradients(pipe.optim_parameters(), plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_with_a_checkpoint_inside(wrap, reentrant):
    checkpointed = module_class("Checkpointed", lambda self, x: checkpoint(self.part, x, use_reentrant=reentrant))()
    checkpointed.part = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), checkpointed, nn.Linear(4, 3))
    plain = copy.deepcopy(model)
    inputs, labels = batch(10)
    F.mse_loss(plain(inputs), labels).backward()
    wrap(model).forward_backward((inputs,), label=labels, loss_fn=weighted)
    assert near_gradients(model, plain)


class Counting(VirtualDevice):
    """Counts the tensors that go down to the host, by their number of axes."""

    def __init__(self):
        super().__init__("virtual:0", check=True)
        self.down = collections.Counter()

    def copy_out(self, tensor, *, parameter=False, **options):
        self.down[tensor.dim()] += not parameter
        return super().copy_out(tensor, parameter=parameter, **options)


class Shifts(nn.Linear):
    """Takes and returns a hidden state and a vector that is the same for all layers; or writes the vector."""

    writes = False

    def forward(self, both):
        x, shift = both
        if self.writes:
            shift.mul_(2.0)
        return torch.tanh(super().forward(x) + shift), shift


class First(Shifts):
    def forward(self, x, shift):
        return super().forward((x, shift))


def shifted(writes):
    torch.manual_seed(0)
    last = module_class("Last", lambda self, both: both[0])()
    model = nn.Sequential(First(4, 4), *[Shifts(4, 4) for _ in range(4)], last)
    model[2].writes = writes
    return model


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("call", ["forward_backward", "forward"])
def test_what_passes_layers_unchanged_goes_down_at_most_once(call, grain, writes):
    inputs, shift, device = batch(6)[0], torch.randn(4), Counting()
    plain, labels, model = shifted(writes), torch.randn(6, 4), shifted(writes)
    F.mse_loss(plain[1:](plain[0](inputs, shift.clone())), labels).backward()
    once = call == "forward"  # what the backward starts from must not be the caller's
    forward = [range(2), range(2, 4), *([range(4, 6)] if once else [])]
    options = RoundPipeRunConfig(
        loss_reduction="mean", num_microbatch=2, recompute_grain=grain, split_input={"args[1]": Replicate},
        execute_plan=ModelExecutePlan(forward, [range(4, 6), range(2, 4), range(2)]),
    )  # fmt: skip
    pipe = without_row_check(RoundPipe(model, devices=[device], model_run_config=options))
    if once:
        loss = F.mse_loss(pipe(inputs, shift), labels)
        shift.zero_()  # the caller's own: it may change before the backward
        loss.backward()
    else:
        pipe.forward_backward((inputs, shift), label=labels, loss_fn=F.mse_loss)
    assert near_gradients(model, plain)
    assert device.down[1] == 2 * (once + writes)


class Reentrant(nn.Linear):
    """A layer whose backward reaches its weight twice: once in each of its checkpoints."""

    def forward(self, x):
        inner = super().forward
        return checkpoint(inner, checkpoint(inner, x, use_reentrant=True), use_reentrant=True)


def make_model(*, tied, dropout=0.0):
    """The small model; ``tied``: one layer has the weight of an earlier stage, and one goes back in two parts."""
    model = small_model(tied=True, dropout=dropout)
    if tied:
        last = type(model[2])(model[2].weight)
        return nn.Sequential(*model[:4], Reentrant(6, 6), last, nn.Linear(6, 3))
    return model


LOSSES = {"sum": F.mse_loss, "mean": F.mse_loss, "pair": weighted}


def trained(four, copies, case, *, model=None, loss_fn=None):
    """Losses and everything that two steps leave, the first of two accumulated calls."""
    model = make_model(tied=case["tied"], dropout=case["dropout"]) if model is None else model
    plan = cut_plan(len(model), [2], [3], case["fused"])
    plan.last_stage_copies = copies
    config = RoundPipeRunConfig(
        num_microbatch=case["microbatches"],
        execute_plan=plan,
        loss_reduction="sum" if case["loss"] == "sum" else "mean",
    )
    pipe = RoundPipe(model, optim_dtype=case["optim_dtype"], devices=four[: case["devices"]], model_run_config=config)
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
    "rows": 11, "microbatches": 5, "devices": 4, "fused": 2, "tied": False, "dropout": 0.0, "loss": "mean",
    "optim_dtype": None, "is_async": False, "one_thread": False,
}  # fmt: skip


CASES = st.fixed_dictionaries({
    "rows": st.integers(5, 13), "microbatches": st.integers(1, 7), "devices": st.integers(1, 4),
    "fused": st.integers(1, 3), "tied": st.booleans(), "dropout": st.sampled_from([0.0, 0.3]),
    "loss": st.sampled_from(sorted(LOSSES)), "optim_dtype": st.sampled_from([None, torch.float64, torch.bfloat16]),
    "is_async": st.sampled_from([False, True, "exact"]), "one_thread": st.booleans(),
})  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::roundpipe_runtime.errors.UnevenSplitWarning")
@settings(max_examples=examples(25))
@given(case=CASES, copies=st.integers(2, 4))
@example({**CASE, "tied": True, "optim_dtype": torch.float64, "is_async": "exact", "fused": 3}, 2)
@example({**CASE, "dropout": 0.3, "loss": "pair", "is_async": True}, 3)
@example({**CASE, "optim_dtype": torch.bfloat16, "one_thread": True}, 4)
def test_copies_change_no_bit_in_any_case(four, case, copies):
    assert same_bits(trained(four, copies, case), trained(four, 1, case))


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_a_plain_loop_over_microbatches(four, copies, tied):
    """Bit by bit, where each layer has its own weight: the sum of a weight of two layers has another order."""
    model, plain = make_model(tied=tied), make_model(tied=tied)
    inputs, labels = batch(10)
    for rows, own in zip(inputs.split(2), labels.split(2), strict=True):
        (plain(rows) - own).square().sum().backward()
    plan = cut_plan(len(model), [2], [3], 3)
    plan.last_stage_copies = copies
    config = RoundPipeRunConfig(num_microbatch=5, execute_plan=plan)
    RoundPipe(model, devices=four).forward_backward(
        (inputs,), label=labels, loss_fn=lambda o, y: (o - y).square().sum(), run_config=config
    )
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        if found is model[2].weight:
            torch.testing.assert_close(found.grad, expected.grad)
        else:
            assert torch.equal(found.grad, expected.grad)


def config_of(stages, copies, microbatches):
    plan = ModelExecutePlan(*stages, last_stage_copies=copies)
    return RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=plan)


def test_each_copy_takes_its_microbatches(four):
    inputs, labels = batch(5)
    pipe = RoundPipe(make_model(tied=False), devices=four)
    config = config_of([[range(6)], [range(6, 7), range(6)]], 3, 5)
    with Timeline() as timeline:
        pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
    ran = {(one.device, one.microbatch) for one in timeline.records if one.kind == "backward" and one.layer == 6}
    names = [device.name for device in four[1:]]
    assert ran == {(names[microbatch % 3], microbatch) for microbatch in range(5)}


def test_what_the_loss_trains_is_added_in_order(four):
    found = []
    for copies in (1, 3):
        model = make_model(tied=False)
        criterion = Criterion(model[0].weight, pair=True)
        found.append([*trained(four, copies, CASE, model=model, loss_fn=criterion), criterion.temperature.grad])
    assert same_bits(*found)


@pytest.mark.parametrize("failing", range(5))
def test_an_error_in_one_copy_leaves_nothing(four, failing):
    """The error has its place. A loss that does not run on the first rows, by which it is proven, gets all rows."""
    model = make_model(tied=False)
    plan = cut_plan(len(model), [2], [3], 2)
    plan.last_stage_copies = 3
    inputs, labels = batch(5)
    labels[failing] = torch.nan
    criterion = Criterion(model[0].weight, pair=False)

    def loss_fn(outputs, labels):
        if labels.isnan().any():
            raise ValueError("not a number")
        return criterion(outputs, labels)

    pipe = RoundPipe(model, devices=four)
    config = RoundPipeRunConfig(num_microbatch=5, execute_plan=plan)
    with pytest.raises(ValueError, match="not a number") as caught:
        pipe.forward_backward((inputs,), label=labels, loss_fn=loss_fn, run_config=config)
    place = "all rows: tensors float32(5, 3), float32(5, 3)" if failing < 3 else f"microbatch {failing} of 5"
    assert any(place in note for note in caught.value.__notes__)
    assert all(parameter.grad is None for parameter in [*model.parameters(), criterion.temperature])
    pipe.forward_backward((inputs,), label=torch.zeros_like(labels), loss_fn=loss_fn, run_config=config)
    assert all(parameter.grad is not None for parameter in model.parameters())


HEAD = [[range(1)], [range(1, 2), range(1)]]


def test_a_layer_that_writes_a_buffer_is_refused(four):
    """What a copy counts would miss the microbatches of the others; nothing is written. In eval it writes none."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    inputs, labels = batch(8)
    before = [buffer.clone() for buffer in model.buffers()]
    pipe = RoundPipe(model, devices=four)
    call = {"label": labels, "loss_fn": F.mse_loss, "run_config": config_of(HEAD, 2, 4)}
    message = r"layer 1 \(BatchNorm1d\) wrote its buffer 'running_mean'.*\n.*last_stage_copies=1"
    with pytest.raises(StageError, match=message):
        pipe.forward_backward((inputs,), **call)
    assert all(map(torch.equal, before, model.buffers()))
    assert all(parameter.grad is None for parameter in model.parameters())
    pipe.eval()
    pipe.forward_backward((inputs,), **call)
    assert model[0].weight.grad is not None


def test_a_sparse_gradient_is_added_like_a_dense_one(four):
    lookup = module_class("Lookup", lambda self, x: x + self.table(x.detach().abs().long() % 6)[:, 0])
    inputs, labels = batch(8)
    found = []
    for copies in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), lookup())
        model[1].table = nn.Embedding(6, 3, sparse=True)
        RoundPipe(model, devices=four).forward_backward(
            (inputs,), label=labels, loss_fn=F.mse_loss, run_config=config_of(HEAD, copies, 4)
        )
        found.append([parameter.grad.to_dense() for parameter in model.parameters()])
    assert same_bits(*found)


def test_a_computed_plan_copies_a_heavy_head(four):
    inputs, labels = torch.ones(8, 8), torch.ones(8, 64)
    stages, found = [], []
    for copies in (1, 2, "auto"):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], nn.Linear(8, 64))
        pipe = RoundPipe(model, devices=four)
        config = RoundPipeRunConfig(num_microbatch=8, last_stage_copies=copies)
        with Timeline() as timeline:
            pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
        stages.append({one.stage for one in timeline.records if one.kind == "backward" and one.layer == 4})
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert [len(one) for one in stages[:2]] == [1, 2]
    assert len(stages[2]) > 1
    assert same_bits(found[1], found[0])
    assert same_bits(found[2], found[0])
