"""Stages go to devices in turn; the clock diagrams are the expected values."""

import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_runtime.errors import ConfigError
from roundpipe_runtime.schedule.round_robin import RoundRobin, clock_cycles, draw, stages_of, steps_in_order

FUSED = stages_of("fused", [range(2), range(2, 3)], [range(3, 4), range(1, 3), range(1)])


def diagram(stages, num_devices, num_microbatch, cursor=0):
    return draw(stages, RoundRobin(num_devices, cursor).assign(len(stages)), num_microbatch)


def expect(text):
    return textwrap.dedent(text).strip("\n")


def test_one_device_runs_stage_after_stage():
    assert diagram(FUSED[:3], 1, 2) == expect("""
        clock  device 0
          0    F0 m0
          1    F0 m1
          2    F1 m0
          3    F1 m1
          4    L  m0
          5    L  m1
    """)


def test_a_stage_runs_one_microbatch_behind_the_one_before_it():
    assert diagram(FUSED, 2, 3) == expect("""
        clock  device 0  device 1
          0    F0 m0     .
          1    F0 m1     F1 m0
          2    F0 m2     F1 m1
          3    L  m0     F1 m2
          4    L  m1     B0 m0
          5    L  m2     B0 m1
          6    B1 m0     B0 m2
          7    B1 m1     .
          8    B1 m2     .
    """)


def test_fewer_microbatches_than_devices_leave_bubbles():
    assert diagram(FUSED, 3, 2) == expect("""
        clock  device 0  device 1  device 2
          0    F0 m0     .         .
          1    F0 m1     F1 m0     .
          2    .         F1 m1     L  m0
          3    B0 m0     .         L  m1
          4    B0 m1     B1 m0     .
          5    .         B1 m1     .
    """)


def test_copies_of_the_fused_stage_take_turns():
    stages = stages_of("fused", [range(2)], [range(2, 3), range(2)], last_stage_copies=2)
    assert diagram(stages, 3, 3) == expect("""
        clock  device 0  device 1  device 2
          0    F0 m0     .         .
          1    F0 m1     L  m0     .
          2    F0 m2     .         L  m1
          3    B0 m0     L  m2     .
          4    B0 m1     .         .
          5    B0 m2     .         .
    """)


def test_the_next_iteration_goes_on_where_the_last_one_stopped():
    """Five stages on two devices: the second iteration begins on device 1."""
    deal = RoundRobin(2)
    assert deal.assign(5) == [0, 1, 0, 1, 0]
    assert deal.assign(2) == [1, 0]
    assert diagram(FUSED[:2], 2, 2, cursor=1) == expect("""
        clock  device 0  device 1
          0    .         F0 m0
          1    F1 m0     F0 m1
          2    F1 m1     .
    """)


def test_stages_of_the_three_kinds_of_run():
    forward, backward = [range(1), range(1, 2)], [range(1, 2), range(1)]
    assert [stage.kind for stage in stages_of("infer", forward, backward)] == ["forward", "forward"]
    assert [stage.kind for stage in stages_of("train", forward, backward)] == ["forward"] * 2 + ["backward"] * 2
    assert [stage.kind for stage in stages_of("fused", forward[:1], backward)] == ["forward", "fused", "backward"]


@pytest.mark.parametrize("number", [0, -1])
def test_no_device_is_refused(number):
    with pytest.raises(ConfigError, match="num_devices must be at least 1"):
        RoundRobin(number)


@given(
    num_stages=st.integers(0, 12),
    num_microbatch=st.integers(1, 6),
    num_devices=st.integers(1, 5),
    cursor=st.integers(0, 9),
)
@settings(max_examples=100)
def test_every_step_runs_once_after_what_it_waits_for(num_stages, num_microbatch, num_devices, cursor):
    devices = RoundRobin(num_devices, cursor).assign(num_stages)
    ticks = {}
    for tick, steps in enumerate(clock_cycles(devices, num_microbatch)):
        assert len({step.device for step in steps}) == len(steps)
        for step in steps:
            ticks[step.stage, step.microbatch] = tick
            assert step.device == (cursor + step.stage) % num_devices
    assert len(ticks) == num_stages * num_microbatch
    for (stage, microbatch), tick in ticks.items():
        assert stage == 0 or ticks[stage - 1, microbatch] < tick
        assert microbatch == 0 or ticks[stage, microbatch - 1] < tick
        assert stage < num_devices or ticks[stage - num_devices, num_microbatch - 1] < tick


def test_the_order_of_dispatch_never_waits_for_a_later_step():
    order = [(step.stage, step.microbatch) for step in steps_in_order([0, 1, 0], 2)]
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize(("copies", "sets"), [(1, [1]), (3, [2, 2, 4])])
def test_a_device_holds_more_gradients_of_a_copied_stage(copies, sets):
    stages = stages_of("fused", [range(2)], [range(2, 3), range(2)], copies)
    assert [stage.gradient_sets for stage in stages if stage.kind == "fused"] == sets
