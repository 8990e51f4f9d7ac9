"""Tests of roundpipe_runtime.device.protocol: work is measured where it is done."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import Timeline, VirtualDevice
from roundpipe_runtime.device.protocol import EventClock
from roundpipe_runtime.engine.planner import Planner
from roundpipe_runtime.engine.run import Timer
from roundpipe_runtime.schedule.costs import LayerCost, MeasuredCosts


class FakeEvent:
    def __init__(self, seconds):
        self.seconds = seconds

    def elapsed_time(self, other):
        return 1e3 * (other.seconds - self.seconds)


class FakeStream:
    """A stream that reaches its events at given times."""

    def __init__(self, *seconds):
        self.seconds = iter(seconds)

    def record_event(self, event):
        return FakeEvent(next(self.seconds))


class FakeAccelerator:
    name = "cuda:0"

    def __init__(self, compute, others):
        self.made = EventClock(torch.device("cpu"), compute, others)

    def clock(self):
        return self.made


def test_an_accelerator_is_measured_by_its_own_clock():
    device = FakeAccelerator(FakeStream(10.0, 10.0, 11.0, 11.0, 15.0), {"upload": FakeStream(10.5, 12.0)})
    costs, timeline = MeasuredCosts([LayerCost(1.0, 3.0), LayerCost(1.0, 3.0)]), Timeline()
    timer = Timer(costs, timeline)
    for layer in range(2):
        with timer.measure("forward", 0, device, 0, layer):
            pass
    with timer.measure("upload", 1, device, layer=2):
        pass
    assert not costs.is_measured
    timer.finish()
    assert [cost.forward for cost in costs.costs()] == pytest.approx([1.0, 4.0])
    start = timeline.records[0].start
    assert [(record.kind, record.start - start, record.end - start) for record in timeline.records] == [
        ("forward", pytest.approx(0.0), pytest.approx(1.0)),
        ("forward", pytest.approx(1.0), pytest.approx(5.0)),
        ("upload", pytest.approx(0.5), pytest.approx(2.0)),
    ]


def test_what_the_host_computes_is_known_at_once():
    costs = MeasuredCosts([LayerCost(1.0, 3.0)])
    timer = Timer(costs, None)
    with timer.measure("forward", 0, VirtualDevice(), 0, 0):
        pass
    assert costs.is_measured


@pytest.mark.parametrize("timeline", [None, Timeline()], ids=["plan", "timeline"])
def test_without_events_an_accelerator_is_measured_for_a_timeline_only(timeline):
    costs = MeasuredCosts([LayerCost(1.0, 3.0)])
    timer = Timer(costs, timeline, with_events=False)
    with timer.measure("forward", 0, FakeAccelerator(FakeStream(10.0, 10.0, 11.0), {}), 0, 0):
        pass
    timer.finish()
    assert costs.is_measured == (timeline is not None)


def test_plans_are_made_of_what_the_runs_before_them_measured():
    """The first four runs of a kind, and then the two before the runs 9, 17 ..., which make a plan again."""
    planner = Planner([nn.Linear(1, 1)], [])
    measured = [number for number in range(1, 40) if planner.wants_events("fused")]
    assert measured == [1, 2, 3, 4, 7, 8, 15, 16, 31, 32]
    assert planner.wants_events("infer")
