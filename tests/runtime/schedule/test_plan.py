"""Plans of stages: as they are written, checked, and computed."""

import itertools
import re
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from roundpipe_runtime.errors import PlanError
from roundpipe_runtime.schedule.partitioning import LayerCost, _time, partition, partition_and_copy
from roundpipe_runtime.schedule.plan import ModelExecutePlan
from roundpipe_runtime.schedule.simulation import Machine, StageLoad, makespan, simulate
from tests.runtime.schedule.test_simulation import LARGE, SMALL, model_like

BACKWARD = [range(3, 4), range(1, 3), range(1)]


@pytest.mark.parametrize(
    ("run_type", "forward", "backward"),
    [
        ("infer", [range(2), range(2, 4)], []),
        ("train", [range(2), range(2, 4)], BACKWARD),
        ("fused", [range(3)], BACKWARD),
        ("fused", [], [range(4)]),
        ("fused", [[0], [1, 2]], [[3], [1, 2], [0]]),
        ("fused", [[0, 1, 2]], [range(3, 4), range(2, 3), range(1, 2), range(1)]),
    ],
)
def test_right_plans_pass_as_written_and_as_made(run_type, forward, backward):
    """An empty plan, and its attributes set, as the reference has it."""
    plan = ModelExecutePlan()
    plan.fwd_plan, plan.bwd_plan = forward, backward
    assert plan.check_valid(run_type, 4) is None
    kinds = {"infer": "forward", "train": "backward", "fused": "fused" if len(backward) == 1 else "backward"}
    assert plan.stages(run_type, 4)[-1].kind == kinds[run_type]
    for layers in (1, 2, 5, 12):
        model = nn.Sequential(*[nn.Linear(8 + i, 9 + i) for i in range(layers)])
        ModelExecutePlan.auto(run_type, model, min_stages=3).check_valid(run_type, layers)


def test_copies_of_the_fused_stage_are_stages_of_their_own():
    plan = ModelExecutePlan([range(3)], [range(3, 4), range(3)], last_stage_copies=3)
    found = plan.stages("fused", 4)
    assert [(s.index, s.kind, s.copy, s.copies) for s in found[1:4]] == [(k + 1, "fused", k, 3) for k in range(3)]
    assert [list(stage.microbatches(5)) for stage in found] == [[*range(5)], [0, 3], [1, 4], [2], [*range(5)]]
    assert [stage.is_last_copy for stage in found] == [True, False, False, True, True]
    assert [stage.gradient_sets for stage in found] == [1, 2, 2, 4, 1]  # a device holds more of a copied stage
    assert len(plan.stages("fused", 4, most_copies=2)) == 4
    whole = ModelExecutePlan([range(4)], [range(2, 4), range(2)], last_stage_copies=3)
    assert len(whole.stages("train", 4)) == 3
    for plan.last_stage_copies in (0, "auto", True):
        with pytest.raises(PlanError, match="last_stage_copies must be an int of at least 1"):
            plan.check_valid("fused", 4)


@pytest.mark.parametrize(
    ("run_type", "forward", "backward", "message"),
    [
        (
            "fused",
            [range(2)],
            BACKWARD,
            "fwd_plan misses layer 2: it is [range(0, 2)], but must contain each of the layers 0 to 2 once, in order; "
            "the first stage of bwd_plan runs forward and backward of the other layers.",
        ),
        ("infer", [range(3), range(2, 4)], [], "fwd_plan repeats layer 2"),
        ("infer", [range(5)], [], "fwd_plan names layer 4, which the model does not have"),
        ("infer", [range(2, 4), range(2)], [], "fwd_plan reorders layer 2"),
        ("infer", [range(4)], 3, "bwd_plan must be a list of ranges, found 3."),
        ("infer", [range(4)], [range(3, 4), []], "bwd_plan[1] is empty."),
        ("train", [range(4)], [], "bwd_plan misses layer 0"),
        ("fused", [range(3)], [range(2, 3), range(2)], "bwd_plan misses layer 3"),
        ("fused", [range(4)], BACKWARD, "fwd_plan repeats layer 3"),
        ("fused", [range(3)], [], 'bwd_plan is empty. With run_type="fused", its first stage must run the last'),
        ("fused", [[0, 2]], BACKWARD, "fwd_plan[0] is [0, 2]: layer 1 is missing."),
        ("fused", [range(3)], [range(3, 4), [2, 1], [0]], "bwd_plan[1] is [2, 1]: layer 1 is out of order."),
        ("fused", [range(-1, 3)], BACKWARD, "fwd_plan contains layer -1"),
        ("fused", [["a"]], BACKWARD, "fwd_plan[0] must contain indices of layers, found ['a']."),
        ("other", [range(4)], [], 'run_type must be "infer", "train" or "fused", found \'other\'.'),
    ],
)
def test_wrong_plans_name_the_layer(run_type, forward, backward, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        ModelExecutePlan(forward, backward).check_valid(run_type, 4)


def test_auto_makes_a_plan_per_model_keeps_one_that_is_as_good_and_asks_for_devices_and_memory():
    one, two = [LayerCost(1.0, 3.0)] * 6, [LayerCost(1.0, 3.0)] * 3
    plans = ModelExecutePlan.auto("fused", one, two, min_stages=2)
    plans[0].check_valid("train", 6)
    plans[1].check_valid("fused", 3)
    first = ModelExecutePlan.auto("fused", one, min_stages=2)
    heavy_tail = [*one[1:], LayerCost(8.0, 24.0)]
    assert ModelExecutePlan.auto("fused", heavy_tail, min_stages=2, previous=first) != first
    costs = [LayerCost(1.0, 1.0, param_bytes=3, grad_bytes=3)] * 4
    pipeline = types.SimpleNamespace(num_devices=4, model_memory_limit=24e-9, layer_costs=lambda: costs)
    plan = ModelExecutePlan.auto("fused", pipeline)
    assert all(len(stage) <= 2 for stage in plan.bwd_plan)
    assert len(plan.fwd_plan) + len(plan.bwd_plan) >= 4


def test_options_that_cannot_be_are_refused_by_name():
    """A limit of NaN, above all, would be no limit; a plan of a model needs no weights."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(4)])
    ModelExecutePlan.auto("fused", model, model_memory_limit=1.0).check_valid("fused", 4)
    wrong = {"min_stages": (1.5, True, 0), "upper_threshold": ("1.1", 0.9), "model_memory_limit": (float("nan"), -1)}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(PlanError, match=name):
                ModelExecutePlan.auto("fused", model, **{name: value})
    with pytest.raises(PlanError, match=r'ModelExecutePlan\.auto\("fused", model\)'):
        ModelExecutePlan.auto("fused")
    with pytest.raises(PlanError, match=r"run_type must be .*, found 'backward'"):
        ModelExecutePlan.auto("backward", model)
    large = [LayerCost(1.0, 3.0), LayerCost(1.0, 3.0, 4 * 10**9, 4 * 10**9)]
    with pytest.raises(PlanError, match=r"layer 1 has 8 GB of parameters and gradients, but a stage may have 3 GB"):
        partition("fused", [large], bytes_per_stage=3e9)


def test_a_check_without_its_two_arguments_is_refused():
    """The two are told apart by what they are, so they are taken in any order; the message shows the call."""
    plan = ModelExecutePlan(fwd_plan=[range(3)], bwd_plan=[range(3, 4), range(3)])
    for values, named, message in [
        ((4, "forward"), {}, r"run_type must be \"infer\", \"train\" or \"fused\", found 'forward'"),
        ((4, 5), {}, "num_layers is given twice"),
        (("fused",), {"run_type": "train"}, "run_type is given twice"),
        ((4,), {}, "check_valid takes num_layers and run_type, found num_layers:"),
        ((), {}, "check_valid takes num_layers and run_type, found nothing:"),
        ((4, "fused"), {"layers": 3}, "found layers, num_layers, run_type:"),
        ((0, "fused"), {}, "A plan needs a model with at least one layer"),
    ]:
        with pytest.raises(PlanError, match=message):
            plan.check_valid(*values, **named)
    plan.check_valid("fused", 4)


def times_of(costs, plan):
    forward, backward = plan
    return [sum(costs[i].forward for i in s) for s in forward] + [sum(costs[i].backward for i in s) for s in backward]


def utilisation(times, devices):
    microbatches = devices + 1
    return sum(times) * microbatches / devices / makespan(times, devices, microbatches)


def test_forward_stages_hold_three_times_the_layers_and_a_heavy_head_is_a_stage_of_its_own():
    """A backward with recompute takes three forwards; the fused stage is no forward stage."""
    ((forward, backward),) = partition("fused", [[LayerCost(1.0, 3.0)] * 10])
    assert forward == [range(3), range(3, 6), range(6, 9)]
    assert backward == [range(i, i + 1) for i in range(9, -1, -1)]
    ((forward, backward),) = partition("fused", [[*[LayerCost(1.0, 3.0)] * 6, LayerCost(2.0, 6.0)]])
    assert backward[0] == range(6, 7)
    assert forward == [range(6)]
    assert backward[1:] == [range(4, 6), range(2, 4), range(2)]
    # a slow layer lets all others share one stage; eight devices want more than that
    ((forward, backward),) = partition("fused", [[*[LayerCost(1.0, 3.0)] * 8, LayerCost(8.0, 24.0)]], min_stages=8)
    assert len(forward) + len(backward) >= 8


@pytest.mark.parametrize(("layers", "head", "by_hand"), [(32, 3.0, LARGE), (28, 6.0, SMALL)])
def test_the_plan_is_as_good_as_the_one_by_hand(layers, head, by_hand):
    """The plans behind the figures in the design, 8 devices; 2 % are given for fewer stages."""
    costs = model_like(layers, head)
    (plan,) = partition("fused", [costs], min_stages=8)
    assert utilisation(times_of(costs, plan), 8) >= 0.98 * utilisation(by_hand, 8)


@pytest.mark.parametrize(
    ("layers", "head", "num_microbatch", "least"),
    [(32, 3.0, 16, 0.80), (32, 3.0, 64, 0.92), (28, 6.0, 16, 0.70), (28, 6.0, 64, 0.85)],
)
def test_copies_of_the_head_fill_the_devices(layers, head, num_microbatch, least):
    """Exact steps on 8 devices reach the figures that no plan reaches with one device for the head."""
    costs = model_like(layers, head)

    def utilisation(copies):
        plan = ModelExecutePlan.auto(
            "fused", costs, min_stages=8, last_stage_copies=copies, num_microbatch=num_microbatch
        )

        def load(stage):
            seconds = [costs[i].forward if stage.kind == "forward" else costs[i].backward for i in stage.layers]
            return StageLoad(sum(seconds), copies=stage.copies, copy=stage.copy)

        loads = list(map(load, plan.stages("fused", len(costs))))
        return simulate(loads, Machine(8), num_microbatch).utilisation

    assert utilisation("auto") >= least
    assert utilisation(1) < least


def test_copies_that_gain_nothing_are_not_made_and_many_uneven_layers_are_planned_in_time():
    """Of equal layers, and with one microbatch; candidates for a hundred uneven layers are thinned out before."""
    equal, heavy = [LayerCost(1.0, 3.0)] * 8, [*[LayerCost(1.0, 3.0)] * 4, LayerCost(8.0, 24.0)]
    assert partition_and_copy("fused", [equal], min_stages=2, copies="auto")[1] == 1
    assert partition_and_copy("fused", [heavy], min_stages=4, copies="auto", num_microbatch=1)[1] == 1
    assert partition_and_copy("train", [heavy], min_stages=4, copies="auto")[1] == 1
    assert partition_and_copy("fused", [heavy], min_stages=4, copies="auto")[1] > 1
    assert partition_and_copy("fused", [heavy], min_stages=4, copies=9)[1] == 4
    costs = [LayerCost(1 + i / 1000, 3 + i / 300) for i in range(100)]
    (plan,) = partition("fused", [costs], min_stages=8)
    assert utilisation(times_of(costs, plan), 8) > 0.8


def best_by_trying(costs, devices):
    def cuts(count):
        for flags in itertools.product([0, 1], repeat=max(count - 1, 0)):
            ends = [i + 1 for i, flag in enumerate(flags) if flag] + [count]
            yield [range(a, b) for a, b in itertools.pairwise([0, *ends])] if count else []

    return min(
        makespan(times_of(costs, (forward, [range(start, len(costs)), *before[::-1]])), devices, devices + 1)
        for start in range(len(costs))
        for forward in cuts(start)
        for before in cuts(start)
    )


@pytest.mark.parametrize("times", [[1, 1, 1, 1], [1, 2, 1, 3], [4, 1, 1, 1, 1], [1, 1, 1, 1, 2]])
@pytest.mark.parametrize("devices", [1, 2])
def test_small_models_come_close_to_the_best_there_is(times, devices):
    """Within a quarter of the best of all plans; the search looks at one number, the cap."""
    costs = [LayerCost(float(time), 3.0 * time) for time in times]
    (plan,) = partition("fused", [costs], min_stages=devices)
    assert makespan(times_of(costs, plan), devices, devices + 1) <= 1.25 * best_by_trying(costs, devices)


COSTS = st.lists(
    st.builds(
        lambda forward, ratio, size: LayerCost(forward, forward * ratio, size, size),
        st.floats(0.01, 10), st.floats(1, 4), st.integers(0, 50),
    ),
    min_size=1, max_size=14,
)  # fmt: skip


@given(st.lists(COSTS, min_size=1, max_size=3), st.sampled_from(["infer", "train", "fused"]), st.integers(1, 4))
@settings(max_examples=80)
def test_every_layer_is_run_once_in_each_direction(costs, run_type, devices):
    plans = partition(run_type, costs, min_stages=devices, bytes_per_stage=120.0)
    for number, (layers, (forward, backward)) in enumerate(zip(costs, plans, strict=True)):
        is_fused = run_type == "fused" and number == len(costs) - 1
        there = [i for stage in forward for i in stage]
        back = [i for stage in backward[::-1] for i in stage]
        assert there == list(range(backward[0].start if is_fused else len(layers)))
        assert back == ([] if run_type == "infer" else list(range(len(layers))))
        assert all(sum(layers[i].param_bytes for i in stage) <= 120 for stage in forward)
        assert all(sum(2 * layers[i].param_bytes for i in stage) <= 120 for stage in backward)


@given(costs=COSTS, noise=st.lists(st.floats(-0.005, 0.005), min_size=14, max_size=14), devices=st.integers(1, 4))
@settings(max_examples=60)
def test_a_plan_in_use_stays_while_times_wander(costs, noise, devices):
    before = partition("fused", [costs], min_stages=devices)
    assert partition("fused", [costs], min_stages=devices) == before
    wandered = [
        LayerCost(cost.forward * (1 + e), cost.backward * (1 + e)) for cost, e in zip(costs, noise, strict=False)
    ]
    after = partition("fused", [wandered], min_stages=devices, previous=before)
    times = [_time(["fused"], [wandered], plan, devices, devices + 1, 1) for plan in (before, after)]
    assert after == before or times[1] <= 0.97 * times[0]


def test_stages_in_use_that_no_longer_fit_are_replaced():
    costs = [LayerCost(1.0, 3.0, param_bytes=10, grad_bytes=10)] * 4
    for previous in (
        [([range(2)], [range(2, 4), range(2)])] * 2,  # of two models
        [([range(3)], [range(3, 4), range(1, 3), range(1)])],  # parameters of three layers
        [([range(1), range(1, 2)], [range(2, 4), range(2)])],  # parameters and gradients of two
    ):
        ((forward, backward),) = partition("fused", [costs], bytes_per_stage=25, previous=previous)
        assert [list(stage) for stage in backward] == [[3], [2], [1], [0]]
        assert max(map(len, forward)) <= 2
