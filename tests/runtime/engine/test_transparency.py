"""A pipeline, or a chain of two, computes what the plain model does, or refuses where it is unclear what to split."""

import copy
import itertools
import random
import time
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipePackedData, RoundPipeRunConfig, WeightedLoss
from roundpipe_runtime.batch.spec import Replicate, TensorChunkSpec
from roundpipe_runtime.engine.draws import run_base
from roundpipe_runtime.engine.recomputed import call_seed
from roundpipe_runtime.errors import JoinError, LossError, SplitError
from tests.cases import examples
from tests.runtime.small import batch, cut_plan, gradients, near_gradients, relative_error, same_bits, small_model

F = nn.functional
TOLERANCE = 1e-6  # float32, of the norm

cases = st.fixed_dictionaries({
    "rows": st.integers(1, 17), "microbatches": st.integers(1, 8), "devices": st.integers(1, 4),
    "forward": st.lists(st.integers(1, 6), max_size=4), "backward": st.lists(st.integers(1, 6), max_size=4),
    "fused": st.integers(1, 6), "grain": st.sampled_from(["stage", "layer"]),
    "tied": st.booleans(), "fits": st.booleans(),
})  # fmt: skip
SPREAD = {"rows": 7, "microbatches": 3, "devices": 3, "forward": [1, 3], "backward": [1, 3], "fused": 2}
SPREAD |= {"grain": "stage", "tied": False, "fits": True}


def wrapped(model, four, case, **fields):
    plan = cut_plan(len(model), case["forward"], case["backward"], case["fused"])
    config = RoundPipeRunConfig(
        num_microbatch=case["microbatches"], execute_plan=plan, recompute_grain=case["grain"], **fields
    )
    pipe = RoundPipe(model, devices=four[: case["devices"]], model_run_config=config)
    # whether layers stay on a device between their two passes
    pipe._rp_engine.planner.fits = lambda: case.get("fits", True)
    return pipe


def parts_of(case, *tensors):
    return list(zip(*(tensor.tensor_split(case["microbatches"]) for tensor in tensors), strict=True))


class Plain(NamedTuple):
    """Loss and gradients of the plain model in float64, and how far those in float32 are from them."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    noise: dict[str, float]


def plain_run(model, inputs, labels, loss_fn, times=1):
    """One backward over the whole batch: what all the pipelines must come near to."""
    exact, single = copy.deepcopy(model).double(), copy.deepcopy(model)
    for _ in range(times):
        loss = loss_fn(exact(inputs.double()), labels.double())
        loss.backward()
        loss_fn(single(inputs), labels).backward()
    expected, found = gradients(exact), gradients(single)
    return Plain(loss.detach(), expected, {name: relative_error(found[name], expected[name]) for name in expected})


def assert_near(model, expected):
    """Within 1e-6. Where terms of a sum cancel, plain float32 is that far away itself: then within 4 times that."""
    for name, gradient in gradients(model).items():
        allowed = max(TOLERANCE, 4 * expected.noise[name])
        assert relative_error(gradient, expected.gradients[name]) < allowed, name


@settings(max_examples=examples(60))
@given(case=cases, times=st.integers(1, 3))
def test_means_and_gradients_are_those_of_the_whole_batch(four, case, times):
    model = small_model(tied=case["tied"])
    inputs, labels = batch(case["rows"])
    expected = plain_run(model, inputs, labels, F.mse_loss, times)
    pipe = wrapped(model, four, case, loss_reduction="mean")
    for _ in range(times):
        loss = pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
    assert relative_error(loss, expected.loss) < TOLERANCE
    assert_near(model, expected)


@settings(max_examples=examples(40))
@given(case=cases, data=st.data())
def test_pairs_of_sum_and_weight_are_exact(four, case, data):
    model = small_model(tied=case["tied"])
    inputs, labels = batch(case["rows"])
    counts = torch.tensor(data.draw(st.lists(st.booleans(), min_size=case["rows"], max_size=case["rows"])))

    def pair(outputs, labelled):
        labels, counts = labelled
        return WeightedLoss((((outputs - labels) ** 2).sum(1) * counts).sum(), counts.sum())

    def whole(outputs, labels):
        return pair(outputs, (labels, counts)).sum / max(counts.sum(), 1)

    expected = plain_run(model, inputs, labels, whole)
    pipe = wrapped(model, four, case)
    loss = pipe.forward_backward((inputs,), label=(labels, counts.float()), loss_fn=pair)
    assert relative_error(loss, expected.loss) < TOLERANCE
    assert_near(model, expected)


@settings(max_examples=examples(40))
@given(
    case=cases,
    dropout=st.sampled_from([0.0, 0.4]),
    norm=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
@example(case=SPREAD, dropout=0.0, norm=False, dtype=torch.float64)
@example(case=SPREAD, dropout=0.0, norm=False, dtype=torch.bfloat16)
@example(case=SPREAD, dropout=0.0, norm=False, dtype=torch.float16)
def test_device_count_and_plan_change_no_bit(four, case, dropout, norm, dtype):
    model = small_model(tied=case["tied"], dropout=dropout, norm=norm).to(dtype)
    twin = copy.deepcopy(model)
    # a norm wants two rows
    inputs, labels = (tensor.to(dtype) for tensor in batch(max(case["rows"], 2 * case["microbatches"])))
    one = dict(case, devices=1, forward=[], backward=[], fused=len(model), grain="stage", fits=False)
    assert same_bits(*(two_runs(which, four, how, inputs, labels) for which, how in ((model, case), (twin, one))))


def two_runs(model, four, case, inputs, labels):
    torch.manual_seed(0)
    pipe = wrapped(model, four, case, loss_reduction="mean")
    losses = [pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss) for _ in range(2)]
    return [*losses, *(parameter.grad.clone() for parameter in model.parameters()), *model.buffers()]


@settings(max_examples=examples(25))
@given(case=cases, times=st.integers(1, 2))
def test_dropout_is_that_of_the_plain_model_with_the_same_seeds(four, case, times):
    """A plain loop over layers, each seeded as documented, draws the same masks: loss and gradients are the same."""
    model = small_model(tied=case["tied"], dropout=0.4)
    reference = copy.deepcopy(model)
    inputs, labels = batch(max(case["rows"], case["microbatches"]))
    begin, tag = torch.get_rng_state(), f"|{len(model)}|{sum(p.numel() for p in model.parameters())}"
    for _ in range(times):
        base, before, total = run_base(), torch.get_rng_state(), 0.0
        for microbatch, (hidden, label) in enumerate(parts_of(case, inputs, labels)):
            share = len(hidden) / len(inputs)
            for number, layer in enumerate(reference):
                torch.manual_seed(call_seed(base, tag, number, microbatch))
                hidden = layer(hidden)
            loss = F.mse_loss(hidden, label) * share
            loss.backward()
            total += loss.item()
        torch.set_rng_state(before)
        torch.empty((), dtype=torch.int64).random_()  # as a run that draws moves it
    torch.set_rng_state(begin)
    pipe = wrapped(model, four, case, loss_reduction="mean")
    for _ in range(times):
        found = pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
    assert relative_error(found, torch.tensor(total)) < TOLERANCE
    assert near_gradients(model, reference)


@settings(max_examples=examples(25))
@given(case=cases)
def test_batch_norm_sees_its_microbatches_in_sequence(four, case):
    """In float32: a norm over two rows is too badly conditioned to be compared with float64."""
    model = small_model(norm=True)
    inputs, labels = batch(2 * case["microbatches"] + case["rows"] % 2)
    reference = copy.deepcopy(model)
    for part, label in parts_of(case, inputs, labels):
        (F.mse_loss(reference(part), label) * (len(part) / len(inputs))).backward()
    pipe = wrapped(model, four, case, loss_reduction="mean")
    pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
    assert near_gradients(model, reference)
    found, expected = dict(model.named_buffers()), dict(reference.named_buffers())
    assert len(found) == 3
    assert found["4.num_batches_tracked"] == case["microbatches"]
    assert all(relative_error(found[name], expected[name]) < TOLERANCE for name in expected)


@settings(max_examples=examples(25))
@given(case=cases)
def test_forward_and_then_backward_is_the_same_function(four, case):
    model = small_model(tied=case["tied"])
    inputs, labels = batch(case["rows"])
    expected = plain_run(model, inputs, labels, F.mse_loss)
    exact = inputs.double().requires_grad_()
    F.mse_loss(copy.deepcopy(model).double()(exact), labels.double()).backward()
    inputs.requires_grad_()
    pipe = RoundPipe(model, devices=four[: case["devices"]])
    config = RoundPipeRunConfig(num_microbatch=case["microbatches"], recompute_grain=case["grain"])
    loss = F.mse_loss(pipe(inputs, roundpipe_run_config=config), labels)
    loss.backward()
    assert relative_error(loss.detach(), expected.loss) < TOLERANCE
    assert_near(model, expected)
    assert relative_error(inputs.grad, exact.grad) < TOLERANCE


@pytest.mark.parametrize("seed", range(8))
def test_slow_layers_and_copies_change_no_bit(four, monkeypatch, seed):
    delays = random.Random(seed)

    def dawdle(*args):
        time.sleep(delays.choice([0, 0, 0, 0.001, 0.003]))

    case = {"forward": [1, 3], "backward": [2, 4], "fused": 2, "microbatches": 4, "grain": "stage", "devices": 4}
    found = []
    for slow in (False, True):
        model = small_model(tied=True, dropout=0.3, norm=True)
        if slow:
            for layer in model:
                layer.register_forward_pre_hook(dawdle)
            for device in four:
                for name in ("copy_in", "copy_out"):
                    original = getattr(device, name)
                    monkeypatch.setattr(device, name, lambda *a, copy=original, **k: (dawdle(), copy(*a, **k))[1])
        found.append(two_runs(model, four, case, *batch(9)))
    assert same_bits(*found)


def losses_by_items():
    """Losses whose mean is not over rows, with labels that show it."""
    weight = torch.tensor([1.0, 5.0, 0.5])
    return {
        "ignored": (nn.CrossEntropyLoss(), torch.tensor([-100, -100, 1, 2, 0, 1])),
        "all ignored": (nn.CrossEntropyLoss(), torch.tensor([-100, -100, -100, 2, 0, 1])),
        "classes weighted": (nn.CrossEntropyLoss(weight), torch.tensor([0, 0, 1, 1, 2, 2])),
        "nll": (lambda out, y: F.nll_loss(out.log_softmax(-1), y), torch.tensor([-100, 1, 2, 0, 1, 2])),
        "one of two": (
            lambda out, y: F.mse_loss(out, torch.zeros_like(out)) + F.cross_entropy(out, y),
            torch.tensor([0, 1, 2, 2, -100, -100]),
        ),
        "not always": (
            lambda out, y: F.cross_entropy(out, y) if (y == 0).any() else out.square().mean(),
            torch.tensor([0, 1, 2, 2, 1, 1]),
        ),
    }


@pytest.mark.parametrize("name", losses_by_items())
def test_a_mean_over_something_else_than_rows_is_refused(name):
    loss_fn, labels = losses_by_items()[name]
    x, _ = batch(6)
    pipe = RoundPipe(copy.deepcopy(small_model()), devices="virtual:2")
    mean = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=2)
    with pytest.raises(LossError, match=r"mean over [^$]*\n    return WeightedLoss\("):
        pipe.forward_backward((x,), label=labels, loss_fn=loss_fn, run_config=mean)
    assert all(parameter.grad is None for parameter in pipe.parameters())


WIDTH, CONSTANTS = 11, 9  # no number of rows here: what looks like rows is taken for rows, as the guide says


class First(nn.Linear):
    """What comes out has rows, or has none, or is no tensor."""

    def forward(self, x, table=None, triangle=None):
        hidden = super().forward(x)
        if table is not None:
            hidden = hidden * table.mean(0)
        time, constant = hidden.T.contiguous(), torch.full((CONSTANTS,), 0.1, device=x.device)
        return {"hidden": hidden, "time": time, "number": 3, "constant": constant, "mean": hidden.square().mean()}


class Second(nn.Linear):
    """Reads the hidden rows, and what else it is given: a table, rows of the input, constants."""

    def forward(self, hidden, table=None, skip=None, time=None, constant=None, number=1):
        out = super().forward(hidden) * number
        if table is not None:
            out = out + table.mean(0)
        if skip is not None:
            out = out * skip
        if time is not None:
            out = out - time.T
        if constant is not None:
            out = out * constant.sum()
        return out


def sizes_of(rows):
    stops = st.sets(st.integers(1, max(rows - 1, 1)), max_size=3 if rows > 1 else 0).map(sorted)
    return stops.map(lambda at: [stop - start for start, stop in itertools.pairwise([0, *at, rows])])


def by_function(sizes, table_as, triangle=False):
    """A split function for rows of x, which hands the table on in one of several ways, and a triangle without rows."""

    def cut(args, kwargs, num_microbatch):
        parts = args[0].split(sizes)
        more = {"triangle": torch.ones(5, 5).tril()} if triangle else {}
        tables = [{**{name: table_as(value) for name, value in kwargs.items()}, **more} for _ in parts]
        return [(part,) for part in parts], tables

    return cut


def handing_on(sizes):
    """A split function that cuts rows of the input at these rows, and hands packed data on as it is."""

    def cut(args, kwargs, num_microbatch):
        rows = [{"skip": part} for part in kwargs["skip"].split(sizes)] if "skip" in kwargs else [{}] * len(sizes)
        return [args] * len(sizes), [{**kwargs, **row} for row in rows]

    return cut


TABLES = {"itself": lambda table: table, "a copy": lambda table: table.clone(), "a view": lambda table: table[:]}
LOSSES = {
    "sum": (lambda out, label: (out - label).square().sum(), "sum"),
    "mean": (F.mse_loss, "mean"),
    "weighted": (lambda out, label: WeightedLoss((out - label).square().sum(), out.numel()), "sum"),
}


@st.composite
def chains(draw):
    rows = draw(st.integers(1, 7))
    return {
        "rows": rows, "count": draw(st.integers(1, 4)), "sizes": draw(st.none() | sizes_of(rows)),
        "table": draw(st.none() | st.integers(1, 7)), "table_as": draw(st.sampled_from(sorted(TABLES))),
        "merge": draw(st.sampled_from([False, False, True, "by hand"])), "second_count": draw(st.integers(1, 4)),
        "extras": draw(st.sets(st.sampled_from(["table", "skip", "time", "constant", "number"]))),
        "rules": draw(st.booleans()), "second_sizes": draw(st.sampled_from(["none", "none", "labels", "inputs"])),
        "label_parts": draw(sizes_of(rows)), "loss": draw(st.sampled_from(sorted(LOSSES))),
    }  # fmt: skip


def plain(first, second, x, table, label, case):
    out = first(x, table)
    loss = LOSSES[case["loss"]][0](second(out["hidden"], **extras(case, x, table, out)), label)
    if isinstance(loss, WeightedLoss):
        loss = loss.sum / loss.weight
    loss.backward()
    return loss.detach()


def extras(case, x, table, out):
    found = {"table": table, "skip": x, "time": out["time"], "constant": out["constant"], "number": out["number"]}
    return {name: found[name] for name in sorted(case["extras"]) if found[name] is not None}


def chained(first, second, x, table, label, case):
    options = {"merge_output": {"outputs['time']": TensorChunkSpec(1)} if case["merge"] is True else False}
    if case["sizes"] is not None:
        options["split_input"] = by_function(case["sizes"], TABLES[case["table_as"]])
    elif case["rules"] and table is not None:
        options["split_input"] = (None, {"table": Replicate})
    config = RoundPipeRunConfig(num_microbatch=case["count"], **options)
    out = first(x, **({} if table is None else {"table": table}), roundpipe_run_config=config)
    if case["merge"] == "by hand":
        out = {name: RoundPipePackedData(list(value)) for name, value in out.items()}
    loss_fn, reduction = LOSSES[case["loss"]]
    options, kwargs = {}, extras(case, x, table, out)
    if case["rules"]:
        marks = {"table": Replicate, "time": TensorChunkSpec(1), "constant": Replicate}
        options["split_input"] = (None, {name: marks[name] for name in kwargs if name in marks})
    if case["second_sizes"] == "labels":
        options["split_label"] = lambda label, count: list(label.split(case["label_parts"]))
    elif case["second_sizes"] == "inputs":
        hidden = [out["hidden"]] if case["merge"] is True else out["hidden"]
        options["split_input"] = handing_on([len(part) for part in hidden])
    config = RoundPipeRunConfig(num_microbatch=case["second_count"], loss_reduction=reduction, **options)
    return second.forward_backward((out["hidden"],), kwargs, label=label, loss_fn=loss_fn, run_config=config)


def is_told_by_nothing(case):
    """Whether a tensor that is no batch has its size, or the batch looks like what broadcasts: the guide says so."""
    if case["rules"] and case["second_sizes"] != "inputs":
        return case["table"] == case["rows"] and case["sizes"] is not None and case["table_as"] != "itself"
    return case["table"] is not None and case["rows"] in (1, case["table"])


@settings(deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=chains())
@pytest.mark.filterwarnings("ignore::roundpipe_runtime.UnevenSplitWarning")
# labels that a function cuts for this batch may not fit a few rows of it: then nothing is shown, and the numbers hold
@pytest.mark.filterwarnings("ignore:RoundPipe could not check whether the loss:roundpipe_runtime.RoundPipeWarning")
def test_a_chain_has_the_loss_and_the_gradients_of_the_plain_models_or_is_refused(devices, case):
    if is_told_by_nothing(case):
        return
    torch.manual_seed(0)
    first, second = First(WIDTH, WIDTH), Second(WIDTH, WIDTH)
    x, label = torch.randn(case["rows"], WIDTH), torch.randn(case["rows"], WIDTH)
    table = None if case["table"] is None else torch.randn(case["table"], WIDTH)
    models = copy.deepcopy(first), copy.deepcopy(second)
    expected = plain(*models, x, table, label, case)
    try:
        found = chained(RoundPipe(first, devices=devices), RoundPipe(second, devices=devices), x, table, label, case)
    except (SplitError, JoinError, LossError) as error:
        event(f"refused: {type(error).__name__}")
        return
    event("ran")
    assert torch.allclose(found, expected, rtol=1e-4), (found, expected)
    for one, other in zip([first, second], models, strict=True):
        assert near_gradients(one, other, rtol=1e-3, atol=1e-5)


@settings(deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=chains(), triangle=st.booleans(), says=st.sets(st.sampled_from(["time", "hidden", "constant"])))
def test_a_forward_has_the_outputs_and_gradients_of_the_plain_model_or_is_refused(devices, case, triangle, says):
    rows = case["rows"]
    if case["sizes"] is None and not case["rules"] and (case["table"] == rows or rows == 1):
        return
    torch.manual_seed(0)
    model = First(WIDTH, WIDTH)
    plain_model, x = copy.deepcopy(model), torch.randn(rows, WIDTH)
    table = None if case["table"] is None else torch.randn(case["table"], WIDTH)
    expected = plain_model(x, table)
    marks = {"time": TensorChunkSpec(1), "hidden": TensorChunkSpec(0), "constant": Replicate}
    options = {"merge_output": {f"outputs['{name}']": marks[name] for name in says}} if says else {}
    kwargs = {} if table is None else {"table": table}
    if case["sizes"] is not None:
        options["split_input"] = by_function(case["sizes"], TABLES[case["table_as"]], triangle)
    elif case["rules"] and table is not None:
        options["split_input"] = (None, {"table": Replicate})
    config = RoundPipeRunConfig(num_microbatch=case["count"], **options)
    try:
        found = RoundPipe(model, devices=devices)(x, **kwargs, roundpipe_run_config=config)
    except (SplitError, JoinError) as error:
        event(f"refused: {type(error).__name__}")
        return
    event("ran")
    for name, value in expected.items():
        assert torch.allclose(torch.as_tensor(found[name]), torch.as_tensor(value), atol=1e-6), name
    for outputs in (found, expected):
        (outputs["hidden"].square().sum() + outputs["time"].sum() + outputs["mean"]).backward()
    assert near_gradients(model, plain_model, rtol=1e-3, atol=1e-5)
