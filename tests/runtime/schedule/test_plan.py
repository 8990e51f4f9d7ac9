"""A plan runs every layer once in each direction, in order, or says which layer it does not."""

import re

import pytest
import torch
from torch import nn

from roundpipe_runtime.errors import PlanError
from roundpipe_runtime.schedule.costs import LayerCost
from roundpipe_runtime.schedule.plan import ModelExecutePlan

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
def test_right_plans_pass(run_type, forward, backward):
    """Ranges as documented, and lists of indices."""
    assert ModelExecutePlan(forward, backward).check_valid(run_type, 4) is None


def test_a_plan_is_written_as_documented():
    """An empty plan, and its attributes set, as the reference has it."""
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(3)]
    plan.bwd_plan = [range(3, 4), range(2, 3), range(1, 2), range(1)]
    plan.check_valid("fused", 4)
    kinds = [stage.kind for stage in plan.stages("fused", 4)]
    assert kinds == ["forward", "fused", "backward", "backward", "backward"]


def test_copies_of_the_fused_stage_are_stages_of_their_own():
    plan = ModelExecutePlan([range(3)], [range(3, 4), range(3)], last_stage_copies=3)
    found = plan.stages("fused", 4)
    assert [(s.index, s.kind, s.copy, s.copies) for s in found[1:4]] == [(k + 1, "fused", k, 3) for k in range(3)]
    assert [list(stage.microbatches(5)) for stage in found] == [[*range(5)], [0, 3], [1, 4], [2], [*range(5)]]
    assert [stage.is_last_copy for stage in found] == [True, False, False, True, True]
    assert len(plan.stages("fused", 4, most_copies=2)) == 4
    whole = ModelExecutePlan([range(4)], [range(2, 4), range(2)], last_stage_copies=3)
    assert len(whole.stages("train", 4)) == 3
    for wrong in (0, "auto", True):
        with pytest.raises(PlanError, match="last_stage_copies must be a number of devices"):
            ModelExecutePlan([range(3)], [range(3, 4), range(3)], last_stage_copies=wrong).check_valid("fused", 4)


@pytest.mark.parametrize(
    ("run_type", "forward", "backward", "message"),
    [
        (
            "infer",
            [range(2), range(3, 4)],
            [],
            "fwd_plan misses layer 2: it is [range(0, 2), range(3, 4)], and must contain",
        ),
        ("infer", [], [], "fwd_plan misses layer 0"),
        ("infer", [range(3), range(2, 4)], [], "fwd_plan repeats layer 2"),
        ("infer", [range(5)], [], "fwd_plan names layer 4, which the model does not have"),
        ("infer", [range(2, 4), range(2)], [], "fwd_plan reorders layer 2"),
        ("infer", [range(4)], 3, "bwd_plan must be a list of ranges, found 3."),
        ("infer", [range(4)], [range(3, 4), []], "bwd_plan[1] is empty."),
        ("train", [range(4)], [range(2), range(2, 4)], "bwd_plan reorders layer 2"),
        ("train", [range(4)], [range(2, 4), range(1, 3), range(1)], "bwd_plan repeats layer 2"),
        ("train", [range(4)], [], "bwd_plan misses layer 0"),
        ("fused", [range(3)], [range(2, 3), range(2)], "bwd_plan misses layer 3"),
        ("fused", [range(4)], BACKWARD, "fwd_plan repeats layer 3"),
        ("fused", [range(3)], [], "bwd_plan is empty. In a fused run, its first stage must contain the last layers."),
        ("fused", [[0, 2]], BACKWARD, "fwd_plan[0] is [0, 2]: layer 1 is missing."),
        ("fused", [[0, 1, 1]], BACKWARD, "fwd_plan[0] is [0, 1, 1]: layer 1 is repeated."),
        ("fused", [range(3)], [range(3, 4), [2, 1], [0]], "bwd_plan[1] is [2, 1]: layer 1 is out of order."),
        ("fused", [range(3), range(3, 3)], BACKWARD, "fwd_plan[1] is empty."),
        ("fused", [range(-1, 3)], BACKWARD, "fwd_plan has no layer -1"),
        ("fused", [["a"]], BACKWARD, "fwd_plan[0] must contain indices of layers, found ['a']."),
        ("fused", 3, BACKWARD, "fwd_plan must be a list of ranges, found 3."),
        ("other", [range(4)], [], 'run_type must be "infer", "train" or "fused", found \'other\'.'),
    ],
)
def test_wrong_plans_name_the_layer(run_type, forward, backward, message):
    """Missing, repeated, reordered; the other system accepts a fused plan without the last layers."""
    with pytest.raises(PlanError, match=re.escape(message)):
        ModelExecutePlan(forward, backward).check_valid(run_type, 4)


def test_the_message_says_what_to_write():
    with pytest.raises(PlanError) as caught:
        ModelExecutePlan([range(2)], BACKWARD).check_valid("fused", 4)
    assert str(caught.value) == (
        "fwd_plan misses layer 2: it is [range(0, 2)], and must contain each of the layers 0 to 2 once, in order; the "
        "first stage of bwd_plan runs the layers from there on forward and backward."
    )


# -- auto ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_type", ["infer", "train", "fused"])
@pytest.mark.parametrize("layers", [1, 2, 5, 12])
def test_auto_makes_valid_plans(run_type, layers):
    model = nn.Sequential(*[nn.Linear(8 + i, 9 + i) for i in range(layers)])
    plan = ModelExecutePlan.auto(run_type, model, min_stages=3)
    plan.check_valid(run_type, layers)


def test_auto_makes_one_plan_per_model():
    one, two = [LayerCost(1.0, 3.0)] * 6, [LayerCost(1.0, 3.0)] * 3
    plans = ModelExecutePlan.auto("fused", one, two, min_stages=2)
    plans[0].check_valid("train", 6)
    plans[1].check_valid("fused", 3)


def test_auto_asks_the_model_for_devices_and_memory():
    class Pipeline:
        num_devices = 4
        model_memory_limit = 24e-9

        def layer_costs(self):
            return [LayerCost(1.0, 1.0, param_bytes=3, grad_bytes=3)] * 4

    plan = ModelExecutePlan.auto("fused", Pipeline())
    assert all(len(stage) <= 2 for stage in plan.bwd_plan)
    assert len(plan.fwd_plan) + len(plan.bwd_plan) >= 4


def test_auto_keeps_a_plan_that_is_as_good():
    costs = [LayerCost(1.0, 3.0)] * 12
    first = ModelExecutePlan.auto("fused", costs, min_stages=2)
    wandered = [LayerCost(1.0 + 0.01 * (i % 3), 3.0 - 0.02 * (i % 2)) for i in range(12)]
    assert ModelExecutePlan.auto("fused", wandered, min_stages=2, previous=first) == first


def test_auto_needs_a_model():
    with pytest.raises(PlanError, match=r'ModelExecutePlan\.auto\("fused", model\)'):
        ModelExecutePlan.auto("fused")


def test_auto_needs_no_weights():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(4)])
    ModelExecutePlan.auto("fused", model, model_memory_limit=1.0).check_valid("fused", 4)


@pytest.mark.parametrize(
    "option",
    [
        {"min_stages": 1.5},
        {"min_stages": True},
        {"upper_threshold": "1.1"},
        {"model_memory_limit": "24"},
        {"model_memory_limit": float("nan")},
        {"model_memory_limit": -1},
    ],
)
def test_options_that_cannot_be_are_refused_by_name(option):
    """A limit of NaN, above all, would be no limit."""
    (name,) = option
    with pytest.raises(PlanError, match=name):
        ModelExecutePlan.auto("fused", nn.Sequential(nn.Linear(2, 2)), **option)


@pytest.mark.parametrize(
    ("given", "named", "message"),
    [
        ((4, "forward"), {}, r"run_type must be \"infer\", \"train\" or \"fused\", found 'forward'"),
        ((4, 5), {}, "num_layers is given twice"),
        ((4,), {"num_layers": 4}, "num_layers is given twice"),
        (("fused",), {"run_type": "train"}, "run_type is given twice"),
        ((4,), {}, "check_valid takes num_layers and run_type, found num_layers:"),
        ((), {}, "check_valid takes num_layers and run_type, found nothing:"),
        ((4, "fused"), {"layers": 3}, "found layers, num_layers, run_type:"),
        ((0, "fused"), {}, "A model without layers has no plan"),
    ],
)
def test_a_check_without_its_two_arguments_is_refused(given, named, message):
    """The two are told apart by what they are, so they are taken in any order; the message shows the call."""
    with pytest.raises(PlanError, match=message):
        ModelExecutePlan(fwd_plan=[range(3)], bwd_plan=[range(3, 4), range(3)]).check_valid(*given, **named)


def test_a_fused_run_of_one_stage_has_no_forward_stage():
    message = r"fwd_plan repeats layer 0: it is \[range\(0, 2\)\], and must be empty; the first stage of bwd_plan runs"
    with pytest.raises(PlanError, match=message):
        ModelExecutePlan(fwd_plan=[range(2)], bwd_plan=[range(2)]).check_valid(2, "fused")
    ModelExecutePlan(fwd_plan=[], bwd_plan=[range(2)]).check_valid(2, "fused")
