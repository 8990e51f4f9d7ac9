"""No failure of a rank leaves another one waiting."""

import os
import threading
import time

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from roundpipe_runtime import RoundPipeRunConfig, doing_recompute
from roundpipe_runtime.device.accelerator import parse_devices
from roundpipe_runtime.distributed.ranks.alarm import Alarm, News
from roundpipe_runtime.distributed.replicas.rank_groups import RankGroups
from roundpipe_runtime.engine.driver import Engine
from roundpipe_runtime.engine.lifecycle import EngineOptions
from roundpipe_runtime.errors import DistributedError, StoppedByRankError
from tests.runtime.distributed.thread_ranks import ThreadRanks, in_threads
from tests.runtime.small import batch, near, same_bits

MEAN = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean")


class Hears(nn.Linear):
    """A layer in which news of a call arrive."""

    groups, number = None, None

    def forward(self, x):
        if self.groups is not None:
            self.groups.ranks.alarm._hear(self.number)
        return super().forward(x)


def pipelines(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(Hears(4, 4), nn.Linear(4, 4))
    pipeline = wrap(model, replicas=2)
    inputs, labels = torch.randn(8, 4), torch.randn(8, 4)

    def run():
        return pipeline.forward_backward((inputs,), label=labels, loss_fn=nn.functional.mse_loss, run_config=MEAN)

    return model, pipeline, run, lambda: nn.functional.mse_loss(model(inputs), labels)


def test_news_of_the_call_before_do_not_stop_a_call_that_tries_layers(wrap):
    """They arrive a moment later, while the next call tries on a few rows whether layers keep rows apart."""
    model, pipeline, run, plain = pipelines(wrap)
    expected = plain().detach()
    groups = pipeline._rp_groups
    model[0].groups, model[0].number = groups, groups._number
    heard, hear = [], groups.ranks.alarm._hear  # a trial of layers leaves what belongs to the pipeline alone
    groups.ranks.alarm._hear = lambda number: (heard.append(number), hear(number))
    assert near(run(), expected)
    assert len(heard) > 4  # two groups of two microbatches, and the layers that were tried before


def test_news_of_a_call_stop_it(wrap):
    """So does the news that a rank is gone, which names no call."""
    model, pipeline, run, _ = pipelines(wrap)
    groups = pipeline._rp_groups
    for number in (groups._number + 1, None):
        model[0].groups, model[0].number = groups, number
        with pytest.raises(StoppedByRankError):
            run()
        assert groups.news.reason is None


def test_news_that_are_delivered_late_stop_no_later_call():
    """A thread that has looked up who listens may be halted there until the next call has begun."""
    alarm = Alarm(None, 0, 1)
    with News.listening(alarm, 1) as news:
        late = alarm._listener
        late(1)
        assert isinstance(news.reason, StoppedByRankError)
    with News.listening(alarm, 2) as news:
        late(1)
        assert news.reason is None
        alarm._hear(2)
        assert isinstance(news.reason, StoppedByRankError)


EXAMPLES = int(os.environ.get("ROUNDPIPE_FAILURE_ORDERS", "12"))
ROWS, LAYERS = 12, 3
CONFIG = RoundPipeRunConfig(num_microbatch=2, loss_reduction="sum").resolved(1)

KINDS = ["one pass", "backward", "whole", "kept", "step"]
PLACES = ["layer 0", "layer 2", "recompute", "loss", "state", "argument", "gone", "step"]


class BadError(Exception):
    """An error of a user's code."""


class Layer(nn.Linear):
    """A layer that takes some time, and fails or leaves when it is told to."""

    # the groups of the pipeline, which a trial of layers leaves alone: all ranks share what connects them
    groups, fault, seconds = None, None, 0.0

    def forward(self, x):
        time.sleep(self.seconds)
        if self.fault == "gone":
            self.groups.ranks._wire.cut()
        if self.fault is not None and (self.fault != "recompute" or doing_recompute()):
            raise BadError(self.fault)
        return torch.tanh(super().forward(x))


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(4, 4) for _ in range(LAYERS)))


class Whole:
    """A loss of the whole batch: the square of the sum over all rows."""

    def __init__(self, fault):
        self.fault = fault

    def state(self, group):
        if self.fault == "state":
            raise BadError("state")
        return sum((output.detach().sum() for output in group), torch.zeros(()))

    def compute(self, groups, own, stated):
        if self.fault == "loss":
            raise BadError("loss")
        parts = list(stated)
        for number, group in zip(own, groups, strict=True):
            parts[number] = sum((output.sum() for output in group), torch.zeros(()))
        return torch.stack(parts).sum() ** 2, None


def call(engine, model, kind, fault, seconds):
    for number, layer in enumerate(model):
        layer.seconds = seconds
        is_here = fault in (f"layer {number}", "gone" if number == 1 else "", "recompute" if number == 0 else "")
        layer.fault = fault if is_here else None
    own = slice(engine.groups.ranks.rank, None, engine.groups.ranks.size)
    x, y = (one[own] for one in batch(ROWS, 0, labels=4))

    def loss_fn(outputs, labels):
        if fault == "loss":
            raise BadError("loss")
        return (outputs - labels).square().sum()

    try:
        if kind == "step":
            engine.steps.run(lambda: step(engine, fault))
            return
        if kind == "backward":
            loss_fn(engine.forward((x,), {}, CONFIG), y).backward()
            return
        with engine.groups.entering():
            if fault == "argument":
                raise BadError("argument")
            if kind == "whole":
                engine.groups.forward_backward_whole(engine, (x,), {}, Whole(fault), CONFIG)
                return
            with engine.groups.no_sync() if kind == "kept" else torch.enable_grad():
                engine.forward_backward((x,), {}, y, loss_fn, False, CONFIG)
    finally:
        for layer in model:
            layer.fault = None


def step(engine, fault):
    if fault == "step":
        raise BadError("step")
    engine.groups.ranks.exchange(None, "step")  # as clipping does


def fails(kind, fault):
    met = {
        "step": {"step"},
        "whole": {"layer 0", "layer 2", "recompute", "gone", "argument", "loss", "state"},
        "backward": {"recompute"},
    }
    return fault in met.get(kind, {"layer 0", "layer 2", "loss", "argument", "gone"})


# Ranks that have failed try their layers once more: in the second call, when news of the first arrive.
LATE_NEWS = ("whole", {0: "layer 2", 1: "layer 0"}, [0.0, 0.0, 0.0])
FAULTS = st.dictionaries(st.integers(0, 2), st.sampled_from(PLACES), max_size=2)
PAUSES = st.lists(st.sampled_from([0.0, 0.0, 0.004]), min_size=3, max_size=3)


@settings(max_examples=EXAMPLES, deadline=None)
@example(size=2, calls=[LATE_NEWS, ("one pass", {}, [0.03, 0.03, 0.0])])
@example(size=3, calls=[LATE_NEWS, ("kept", {}, [0.03, 0.03, 0.03])])
@example(size=2, calls=[LATE_NEWS, ("whole", {}, [0.03, 0.03, 0.0])])
@given(size=st.integers(2, 3), calls=st.lists(st.tuples(st.sampled_from(KINDS), FAULTS, PAUSES), max_size=4))
def test_no_order_of_failures_leaves_a_rank_waiting(size, calls):
    def run(wire, rank):
        model = models[rank]
        groups = RankGroups(ThreadRanks(wire, rank, 1, size, is_listening=True))
        for layer in model:
            layer.groups = groups
        engine = Engine(model, list(model), parse_devices("virtual:1"), EngineOptions(None, "x"), groups)
        outcome, is_over = [], False
        try:
            for kind, faults, seconds in calls:
                faulty = {where: fault for where, fault in faults.items() if where < size and fails(kind, fault)}
                before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
                begin, raised = time.monotonic(), None
                try:
                    call(engine, model, kind, faulty.get(rank), seconds[rank])
                except (BadError, DistributedError) as error:
                    raised = error
                outcome.append((raised, sorted(faulty)))
                assert time.monotonic() - begin < 8
                assert (raised is not None) == bool(faulty)
                if isinstance(raised, BadError):
                    assert rank in faulty
                elif faulty and "gone" not in faulty.values():
                    assert any(
                        f"ailed on rank {one}" in str(raised) or f"Rank {one} failed" in str(raised) for one in faulty
                    )
                is_over = "gone" in faulty.values() or (bool(faulty) and kind == "step")
                if faulty:
                    assert same_bits([p.grad for p in model.parameters()], before)
                if is_over:
                    return outcome
            engine.zero_grad(set_to_none=True)
            call(engine, model, "one pass", None, 0.0)
            return [p.grad for p in model.parameters()]
        finally:
            engine.close()

    models = [layers() for _ in range(size)]
    before = threading.active_count()
    found = in_threads(size, run)
    plain = layers()
    inputs, labels = batch(ROWS, 0, labels=4)
    (plain(inputs) - labels).square().sum().backward()
    for gradients in found:
        if gradients and isinstance(gradients[0], torch.Tensor):
            for one, parameter in zip(gradients, plain.parameters(), strict=True):
                assert near(one, parameter.grad)
    assert threading.active_count() <= before + 4 * size
