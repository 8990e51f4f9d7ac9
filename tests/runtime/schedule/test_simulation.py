"""Costs of layers, the order of stages on devices, and simulated clocks."""

import dataclasses
import itertools
import textwrap
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from roundpipe_runtime.errors import ConfigError, PlanError
from roundpipe_runtime.schedule.partitioning import LayerCost, MeasuredCosts, analytic_cost, layer_costs
from roundpipe_runtime.schedule.round_robin import RoundRobin, clock_cycles, draw, stages_of, steps_in_order
from roundpipe_runtime.schedule.simulation import Machine, StageLoad, makespan, simulate


def model_like(layers, head):
    """An embedding, equal layers, and a head that costs as much as several; a backward with recompute costs 3 times."""
    forward = [0.05, *[1.0] * layers, head]
    return [LayerCost(time, 3 * time) for time in forward]


def stages_under(costs, cap):
    """Stage times of a fused run by hand: the fused stage from the end, the rest as full as the cap allows."""
    end, fused = len(costs), 0.0
    while end and fused + costs[end - 1].backward <= cap:
        end, fused = end - 1, fused + costs[end - 1].backward

    def pack(times):
        found = []
        for time in times:
            if found and found[-1] + time <= cap:
                found[-1] += time
            else:
                found.append(time)
        return found

    forward = pack([cost.forward for cost in costs[:end]][::-1])[::-1]
    return [*forward, fused, *pack([cost.backward for cost in costs[:end]])[::-1]]


# The figures in the design: utilisation of 8 devices with 9 microbatches.
SMALL = stages_under(model_like(28, 6.0), 18.0)
LARGE = stages_under(model_like(32, 3.0), 9.0)


@pytest.mark.parametrize(
    ("stages", "expected", "with_staleness"), [(LARGE, 0.71, 0.95), (SMALL, 0.53, 0.90)], ids=["8B-like", "1.7B-like"]
)
def test_an_iteration_reaches_what_was_planned_and_with_staleness_iterations_close_up(stages, expected, with_staleness):
    """Copies are free here: what is lost is the filling and draining of the pipeline."""
    loads = [StageLoad(time) for time in stages]
    result = simulate(loads, Machine(8), 9)
    assert result.utilisation == pytest.approx(expected, abs=0.006)
    assert result.bubble == pytest.approx(1 - expected, abs=0.006)
    result = simulate(loads, Machine(8), 9, iterations=20, staleness=1)
    per_iteration = (result.iteration_ends[-1] - result.iteration_ends[4]) / 15
    assert sum(stages) * 9 / 8 / per_iteration == pytest.approx(with_staleness, abs=0.006)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("num_microbatch", [1, 2, 4])
def test_steps_of_equal_length_follow_the_clock(num_devices, num_microbatch):
    """With free copies and equal stages, a simulated second is a tick of the schedule."""
    result = simulate([StageLoad(1.0)] * 5, Machine(num_devices), num_microbatch, cursor=1)
    cycles = clock_cycles(RoundRobin(num_devices, 1).assign(5), num_microbatch)
    expected = {(step.stage, step.microbatch): tick for tick, steps in enumerate(cycles) for step in steps}
    assert {(timed.step.stage, timed.step.microbatch): timed.start for timed in result.steps} == expected
    assert result.time == makespan([1.0] * 5, num_devices, num_microbatch)


def test_an_exact_step_waits_for_the_gradients_and_a_device_without_overlap_does_one_thing_after_the_other():
    """One device, one stage: upload 2 s, compute 3 s, download 1 s; the second iteration begins after all of it."""
    exact = simulate([StageLoad(3.0, upload=20, download=10)], Machine(1, link=10.0), 1, iterations=2)
    assert [timed.start for timed in exact.steps] == [2.0, 8.0]
    assert exact.time == 12.0
    load = StageLoad(3.0, upload=20, download=10, inputs=10, outputs=10)
    result = simulate([load, load], Machine(1, link=10.0, down=20.0, overlaps=False), 2)
    assert [timed.start for timed in result.steps] == [3.0, 7.5, 14.5, 19.0]
    assert result.time == 23.0
    assert result.links == [(2 * (20 + 2 * 10), 2 * (10 + 2 * 10))]


@pytest.mark.parametrize(
    ("seconds", "upload", "starts", "peak"),
    [
        (3.0, 20, [2.0, 5.0, 8.0], 40),  # uploads of 2 s overlap with computations of 3 s, the first one does not
        (1.0, 40, [4.0, 8.0, 12.0], 80),  # 4 s of upload decide; the third needs the room of the first, free by then
        (5.0, 10, [1.0, 6.0, 11.0], 20),  # uploads of 1 s: the third one waits until the first stage has left
    ],
)
def test_the_next_stage_is_copied_while_one_computes(seconds, upload, starts, peak):
    """The longer of both decides, and a device holds two stages at most."""
    result = simulate([StageLoad(seconds, upload=upload)] * 3, Machine(1, link=10.0), 1)
    assert [timed.start for timed in result.steps] == starts
    assert result.peak_memory == peak


def test_bytes_and_memory_are_counted_and_too_little_is_said_before_anything_runs():
    result = simulate([StageLoad(1.0, outputs=10), StageLoad(1.0, inputs=20)], Machine(2, link=10.0), 1)
    assert [timed.start for timed in result.steps] == [0.0, 4.0]  # out in 1 s, and into the next device in 2 s
    stages = [
        StageLoad(1.0, upload=100, inputs=1, outputs=2, working=7),
        StageLoad(1.0, upload=50, download=50, inputs=2),
    ]
    result = simulate(stages, Machine(1, link=1e9), 3, iterations=2)
    assert result.bytes_up == 2 * (150 + 3 * 3)
    assert result.bytes_down == 2 * (50 + 3 * 2)
    # first stage in work, its activations twice, the second one prefetched
    assert result.peak_memory == max(100 + 7 + 2 * 3 + 50, 100 + 2 * 2 + 100)
    with pytest.raises(ConfigError, match=r"needs 2 GB of memory, but has 1.5 GB.*\n.*num_microbatch=4"):
        simulate([StageLoad(1.0, upload=10**9)] * 2, Machine(1, memory=1.5e9), 2)
    with pytest.raises(ConfigError, match="staleness must be 0 or 1"):
        simulate([StageLoad(1.0)], Machine(1), 1, staleness=2)
    with pytest.raises(ConfigError, match="num_devices must be at least 1"):
        RoundRobin(0)
    result = simulate([], Machine(2), 3)  # nothing to do takes no time
    assert (result.time, result.utilisation, result.peak_memory) == (0.0, 1.0, 0)


def test_copies_of_a_stage_take_turns_and_their_gradients_cross_the_host():
    """A stage of 4 s on two of three devices: each has every second microbatch, and its own upload."""
    stages = [StageLoad(1.0), StageLoad(4.0, upload=10, download=10, copies=2)]
    result = simulate(stages, Machine(3, link=1e9), 4)
    ran = [(timed.step.device, timed.step.microbatch, timed.end) for timed in result.steps if timed.step.stage == 1]
    assert ran == [(1, 0, 5.0), (1, 2, 9.0), (2, 1, 6.0), (2, 3, 10.0)]
    assert result.links == [(0, 0), (10, 10), (10, 10)]
    load = StageLoad(4.0, download=5, copies=2, share=20)
    result = simulate([load], Machine(2, link=10.0), 3)
    # microbatches 0 and 2 on device 0 until 8, their shares down until 6 and 10, the last one up until 12; the sum
    assert result.time == 12.5
    assert result.links == [(0, 2 * 20), (2 * 20, 5)]
    alone = simulate([load], Machine(2, link=10.0, overlaps=False), 3)
    # 4 + 2 twice, one more up and the sum
    assert alone.time == 14.5
    assert alone.links == result.links
    each = [dataclasses.replace(load, copy=copy) for copy in range(2)]
    assert simulate(each, Machine(2, link=10.0), 3).links == result.links


FUSED = stages_of("fused", [range(2), range(2, 3)], [range(3, 4), range(1, 3), range(1)])


COPIED = stages_of("fused", [range(2)], [range(2, 3), range(2)], last_stage_copies=2)
# stages, devices, microbatches, where the last iteration stopped, and the drawing
DIAGRAMS = {
    "a stage runs one microbatch behind the one before it": (FUSED, 2, 3, 0, """
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
    """),
    "fewer microbatches than devices leave bubbles": (FUSED, 3, 2, 0, """
        clock  device 0  device 1  device 2
          0    F0 m0     .         .
          1    F0 m1     F1 m0     .
          2    .         F1 m1     L  m0
          3    B0 m0     .         L  m1
          4    B0 m1     B1 m0     .
          5    .         B1 m1     .
    """),
    "copies of the fused stage take turns": (COPIED, 3, 3, 0, """
        clock  device 0  device 1  device 2
          0    F0 m0     .         .
          1    F0 m1     L  m0     .
          2    F0 m2     .         L  m1
          3    B0 m0     L  m2     .
          4    B0 m1     .         .
          5    B0 m2     .         .
    """),
    "the next iteration goes on where the last one stopped": (FUSED[:2], 2, 2, 1, """
        clock  device 0  device 1
          0    .         F0 m0
          1    F1 m0     F0 m1
          2    F1 m1     .
    """),
}  # fmt: skip


@pytest.mark.parametrize("claim", DIAGRAMS)
def test_the_schedule_is_drawn(claim):
    stages, num_devices, num_microbatch, cursor, text = DIAGRAMS[claim]
    found = draw(stages, RoundRobin(num_devices, cursor).assign(len(stages)), num_microbatch)
    assert found == textwrap.dedent(text).strip("\n")


@given(st.integers(0, 12), st.integers(1, 6), st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=100)
def test_every_step_runs_once_after_what_it_waits_for(num_stages, num_microbatch, num_devices, cursor):
    dealt = RoundRobin(num_devices, cursor)
    devices = dealt.assign(num_stages)
    order = [(step.stage, step.microbatch) for step in steps_in_order(devices, num_microbatch)]
    assert order == list(itertools.product(range(num_stages), range(num_microbatch)))
    assert dealt.assign(1) == [(cursor + num_stages) % num_devices]
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


def test_costs_are_guessed_from_the_layers():
    """Nothing is allocated for it."""
    cost = analytic_cost(nn.Linear(64, 128, bias=False))
    assert cost == LayerCost(64 * 128, 3 * 64 * 128, 4 * 64 * 128, 4 * 64 * 128)
    assert analytic_cost(nn.BatchNorm1d(4)).param_bytes == 4 * (4 + 4 + 4 + 4) + 8
    frozen = analytic_cost(nn.Linear(64, 128, bias=False).requires_grad_(False))
    assert (frozen.backward, frozen.grad_bytes) == (2 * 64 * 128, 0)
    # an embedding looks up, however many rows its table has
    assert analytic_cost(nn.Embedding(1000, 64)).forward == analytic_cost(nn.Embedding(10, 64)).forward
    assert analytic_cost(nn.Linear(64, 1000)).forward == 64_000
    assert analytic_cost(nn.ReLU()).forward > 0  # it moves activations
    with torch.device("meta"):
        assert analytic_cost(nn.Linear(10_000, 10_000)).param_bytes == 4 * 10_000 * 10_001
    assert LayerCost(1.0, 2.0, 3, 4) + LayerCost(0.5, 0.25, 10, 20) == LayerCost(1.5, 2.25, 13, 24)
    assert len(layer_costs(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))) == 2
    assert len(layer_costs(nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]))) == 1
    known = types.SimpleNamespace(layer_costs=lambda: [LayerCost(1.0)])
    assert layer_costs(known) == [LayerCost(1.0)]
    for model, message in [(nn.Sequential(), "at least one layer"), (3, "found int"), ([], "at least one layer")]:
        with pytest.raises(PlanError, match=message):
            layer_costs(model)


def test_measured_times_replace_the_guess_and_the_share_of_quick_layers_is_known():
    """Layer 0 was guessed 2 and takes 10 s, so a layer guessed 1 is taken to need 5 s."""
    costs = MeasuredCosts([LayerCost(2.0, 6.0, 8, 9), LayerCost(1.0, 3.0)])
    assert costs.costs()[0].forward == 2.0
    assert not costs.is_measured
    costs.record(0, "forward", 10.0)
    assert costs.is_measured
    assert [(cost.forward, cost.backward) for cost in costs.costs()] == [(10.0, 30.0), (5.0, 15.0)]
    assert costs.costs()[0].param_bytes == 8
    # an average in which the newest counts a fifth: one slow step does not turn the plan over
    costs.record(0, "forward", 10.0)
    costs.record(0, "forward", 60.0)
    assert costs.costs()[0].forward == pytest.approx(20.0)
    costs = MeasuredCosts([LayerCost(1.0, 3.0)] * 3)
    assert costs.share_below(1.0) == 0.0
    costs.record(0, "forward", 0.25)
    costs.record(1, "forward", 0.75)
    costs.record(2, "backward", 0.01)
    assert costs.share_below(0.5) == 0.25
    costs.record(1, "forward", 0.25)
    costs.record(1, "forward", 0.75)
    assert costs.share_below(0.5) == 1.0
    for _ in range(7):
        costs.record(1, "forward", 0.75)
    assert costs.share_below(0.5) == 0.25


@pytest.mark.parametrize(("dtype", "per_number"), [(torch.bfloat16, 2), (torch.float32, 2 + 4)])
def test_sums_of_another_dtype_take_memory_next_to_the_gradients(dtype, per_number):
    layer = nn.Linear(8, 4, dtype=torch.bfloat16)
    assert analytic_cost(layer, lambda parameter: dtype).grad_bytes == 36 * per_number
