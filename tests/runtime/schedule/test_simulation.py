"""Times, bytes and memory of a schedule, against values worked out by hand and the schedule's own clock."""

import dataclasses

import pytest

from roundpipe_runtime.errors import ConfigError
from roundpipe_runtime.schedule.costs import LayerCost
from roundpipe_runtime.schedule.round_robin import RoundRobin, clock_cycles
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


@pytest.mark.parametrize(("stages", "expected"), [(LARGE, 0.71), (SMALL, 0.53)], ids=["8B-like", "1.7B-like"])
def test_an_isolated_iteration_reaches_what_was_planned(stages, expected):
    """Copies are free here: what is lost is the filling and draining of the pipeline."""
    result = simulate([StageLoad(time) for time in stages], Machine(8), 9)
    assert result.utilisation == pytest.approx(expected, abs=0.006)
    assert result.bubble == pytest.approx(1 - expected, abs=0.006)


@pytest.mark.parametrize(("stages", "expected"), [(LARGE, 0.95), (SMALL, 0.90)], ids=["8B-like", "1.7B-like"])
def test_with_staleness_iterations_close_up(stages, expected):
    result = simulate([StageLoad(time) for time in stages], Machine(8), 9, iterations=20, staleness=1)
    per_iteration = (result.iteration_ends[-1] - result.iteration_ends[4]) / 15
    assert sum(stages) * 9 / 8 / per_iteration == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("num_microbatch", [1, 2, 4])
def test_steps_of_equal_length_follow_the_clock(num_devices, num_microbatch):
    """With free copies and equal stages, a simulated second is a tick of the schedule."""
    result = simulate([StageLoad(1.0)] * 5, Machine(num_devices), num_microbatch, cursor=1)
    cycles = clock_cycles(RoundRobin(num_devices, 1).assign(5), num_microbatch)
    expected = {(step.stage, step.microbatch): tick for tick, steps in enumerate(cycles) for step in steps}
    assert {(timed.step.stage, timed.step.microbatch): timed.start for timed in result.steps} == expected
    assert result.time == makespan([1.0] * 5, num_devices, num_microbatch)


def test_an_exact_step_waits_for_the_gradients():
    """One device, one stage: upload 2 s, compute 3 s, download 1 s; the second iteration begins after all of it."""
    load = StageLoad(3.0, upload=20, download=10)
    exact = simulate([load], Machine(1, link=10.0), 1, iterations=2)
    assert [timed.start for timed in exact.steps] == [2.0, 8.0]
    assert exact.time == 12.0


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


def test_activations_cross_two_links():
    """Out of one device in 1 s and into the next one in 2 s."""
    stages = [StageLoad(1.0, outputs=10), StageLoad(1.0, inputs=20)]
    result = simulate(stages, Machine(2, link=10.0), 1)
    assert [timed.start for timed in result.steps] == [0.0, 4.0]


def test_bytes_and_memory_are_counted():
    stages = [
        StageLoad(1.0, upload=100, inputs=1, outputs=2, working=7),
        StageLoad(1.0, upload=50, download=50, inputs=2),
    ]
    result = simulate(stages, Machine(1, link=1e9), 3, iterations=2)
    assert result.bytes_up == 2 * (150 + 3 * 3)
    assert result.bytes_down == 2 * (50 + 3 * 2)
    # first stage in work, its activations twice, the second one prefetched
    assert result.peak_memory == max(100 + 7 + 2 * 3 + 50, 100 + 2 * 2 + 100)


def test_too_little_memory_is_said_before_anything_runs():
    with pytest.raises(ConfigError, match=r"needs 2 GB of memory, but has 1.5 GB.*\n.*num_microbatch=4"):
        simulate([StageLoad(1.0, upload=10**9)] * 2, Machine(1, memory=1.5e9), 2)


def test_another_staleness_is_refused():
    with pytest.raises(ConfigError, match="staleness must be 0 or 1"):
        simulate([StageLoad(1.0)], Machine(1), 1, staleness=2)


def test_nothing_to_do_takes_no_time():
    result = simulate([], Machine(2), 3)
    assert (result.time, result.utilisation, result.peak_memory) == (0.0, 1.0, 0)


def test_a_device_that_does_not_overlap_does_one_thing_after_the_other():
    """Upload 2 s, then per microbatch in 1 s, compute 3 s, out 0.5 s; gradients at last, at another rate."""
    load = StageLoad(3.0, upload=20, download=10, inputs=10, outputs=10)
    result = simulate([load, load], Machine(1, link=10.0, down=20.0, overlaps=False), 2)
    assert [timed.start for timed in result.steps] == [3.0, 7.5, 14.5, 19.0]
    assert result.time == 23.0
    assert result.links == [(2 * (20 + 2 * 10), 2 * (10 + 2 * 10))]


def test_copies_of_a_stage_take_turns():
    """A stage of 4 s on two of three devices: each has every second microbatch, and its own upload."""
    stages = [StageLoad(1.0), StageLoad(4.0, upload=10, download=10, copies=2)]
    result = simulate(stages, Machine(3, link=1e9), 4)
    ran = [(timed.step.device, timed.step.microbatch, timed.end) for timed in result.steps if timed.step.stage == 1]
    assert ran == [(1, 0, 5.0), (1, 2, 9.0), (2, 1, 6.0), (2, 3, 10.0)]
    assert result.links == [(0, 0), (10, 10), (10, 10)]


def test_gradients_of_copies_cross_the_host():
    """Two copies and three microbatches of 4 s; shares of 2 s down and up. The sum leaves when the last one came."""
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
