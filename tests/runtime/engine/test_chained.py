"""Chains of two pipelines beside the plain models: however they are cut and joined, the same loss or an error.

A refusal is right wherever it is not clear what to cut; another number without a word never is.
"""

import copy

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import nn

from roundpipe_runtime import (
    JoinError,
    LossError,
    Replicate,
    RoundPipe,
    RoundPipePackedData,
    RoundPipeRunConfig,
    SplitError,
    TensorChunkSpec,
    WeightedLoss,
)
from tests.cases import examples
from tests.runtime.small import near_gradients

F = nn.functional
WIDTH, CONSTANTS = 11, 9  # no number of rows here: what looks like rows is taken for rows, as the guide says


class First(nn.Module):
    """What comes out has rows, or has none, or is no tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, table=None, triangle=None):
        hidden = self.linear(x)
        if table is not None:
            hidden = hidden * table.mean(0)
        time, constant = hidden.T.contiguous(), torch.full((CONSTANTS,), 0.1, device=x.device)
        return {"hidden": hidden, "time": time, "number": 3, "constant": constant, "mean": hidden.square().mean()}


class Second(nn.Module):
    """Reads the hidden rows, and what else it is given: a table, rows of the input, constants."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, table=None, skip=None, time=None, constant=None, number=1):
        out = self.linear(hidden) * number
        if table is not None:
            out = out + table.mean(0)
        if skip is not None:
            out = out * skip
        if time is not None:
            out = out - time.T
        if constant is not None:
            out = out * constant.sum()
        return out


@st.composite
def partitions(draw, rows):
    """Sizes of one or more that add up to the rows."""
    stops = sorted(draw(st.sets(st.integers(1, rows - 1), max_size=3))) if rows > 1 else []
    return [stop - start for start, stop in zip([0, *stops], [*stops, rows], strict=True)]


def by_function(sizes, table_as):
    """A split function that cuts x at these rows, and hands the table on in one of several ways."""

    def cut(args, kwargs, num_microbatch):
        parts = args[0].split(sizes)
        tables = [{name: table_as(value) for name, value in kwargs.items()} for _ in parts]
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
        "rows": rows,
        "count": draw(st.integers(1, 4)),
        "sizes": draw(st.none() | partitions(rows)),
        "table": draw(st.none() | st.integers(1, 7)),
        "table_as": draw(st.sampled_from(sorted(TABLES))),
        "merge": draw(st.sampled_from([False, False, True, "by hand"])),
        "second_count": draw(st.integers(1, 4)),
        "extras": draw(st.sets(st.sampled_from(["table", "skip", "time", "constant", "number"]))),
        "rules": draw(st.booleans()),
        "second_sizes": draw(st.sampled_from(["none", "none", "labels", "inputs"])),
        "label_parts": draw(partitions(rows)),
        "loss": draw(st.sampled_from(sorted(LOSSES))),
    }


def plain(first, second, x, table, label, case):
    """The loss and the gradients of the whole batch at once."""
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
@pytest.mark.filterwarnings("ignore:It could not be checked that the loss:roundpipe_runtime.RoundPipeWarning")
def test_a_chain_has_the_loss_and_the_gradients_of_the_plain_models_or_is_refused(devices, case):
    if is_told_by_nothing(case):
        return
    torch.manual_seed(0)
    first, second = First(), Second()
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
    model = First()
    plain_model, x = copy.deepcopy(model), torch.randn(rows, WIDTH)
    table = None if case["table"] is None else torch.randn(case["table"], WIDTH)
    expected = plain_model(x, table)
    marks = {"time": TensorChunkSpec(1), "hidden": TensorChunkSpec(0), "constant": Replicate}
    options = {"merge_output": {f"outputs['{name}']": marks[name] for name in says}} if says else {}
    kwargs = {} if table is None else {"table": table}
    if case["sizes"] is not None:
        cut = by_function(case["sizes"], TABLES[case["table_as"]])
        options["split_input"] = with_triangles(cut) if triangle else cut
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


def with_triangles(cut):
    """The same split function, which makes a tensor without rows for each part besides."""

    def cut_more(args, kwargs, num_microbatch):
        args_list, kwargs_list = cut(args, kwargs, num_microbatch)
        return args_list, [{**one, "triangle": torch.ones(5, 5).tril()} for one in kwargs_list]

    return cut_more
