"""A layer costs what its parameters say until it has been measured."""

import pytest
import torch
from torch import nn

from roundpipe_runtime.errors import PlanError
from roundpipe_runtime.schedule.costs import LayerCost, MeasuredCosts, analytic_cost, layer_costs


def test_a_matrix_costs_one_multiplication_per_element():
    cost = analytic_cost(nn.Linear(64, 128, bias=False))
    assert cost == LayerCost(64 * 128, 3 * 64 * 128, 4 * 64 * 128, 4 * 64 * 128)
    assert analytic_cost(nn.BatchNorm1d(4)).param_bytes == 4 * (4 + 4 + 4 + 4) + 8


def test_frozen_layers_have_no_gradients_and_a_shorter_backward():
    layer = nn.Linear(64, 128, bias=False).requires_grad_(False)
    cost = analytic_cost(layer)
    assert (cost.backward, cost.grad_bytes) == (2 * 64 * 128, 0)


def test_an_embedding_looks_up():
    """However many rows its table has; a head that shares the table multiplies with all of them, in its own layer."""
    assert analytic_cost(nn.Embedding(1000, 64)).forward == analytic_cost(nn.Embedding(10, 64)).forward
    assert analytic_cost(nn.Linear(64, 1000)).forward == 64_000


def test_a_layer_without_parameters_costs_something():
    """A plan must not take it for free: it moves activations."""
    assert analytic_cost(nn.ReLU()).forward > 0


def test_a_sequential_has_a_cost_per_child_and_any_other_module_one():
    assert len(layer_costs(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))) == 2
    assert len(layer_costs(nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]))) == 1


def test_a_model_that_knows_is_asked():
    class Pipeline:
        def layer_costs(self):
            return [LayerCost(1.0)]

    assert layer_costs(Pipeline()) == [LayerCost(1.0)]


@pytest.mark.parametrize(("model", "message"), [(nn.Sequential(), "without layers"), (3, "found int"), ([], "without")])
def test_what_has_no_layers_is_refused(model, message):
    with pytest.raises(PlanError, match=message):
        layer_costs(model)


def test_measured_times_replace_the_guess_and_scale_the_rest():
    """Layer 0 was guessed 2 and takes 10 s, so a layer guessed 1 is taken to need 5 s."""
    costs = MeasuredCosts([LayerCost(2.0, 6.0, 8, 9), LayerCost(1.0, 3.0)])
    assert costs.costs()[0].forward == 2.0
    assert not costs.is_measured
    costs.record(0, "forward", 10.0)
    assert costs.is_measured
    assert [(cost.forward, cost.backward) for cost in costs.costs()] == [(10.0, 30.0), (5.0, 15.0)]
    assert costs.costs()[0].param_bytes == 8


def test_measurements_are_averaged_with_the_newest_counting_a_fifth():
    """One slow step does not turn the plan over."""
    costs = MeasuredCosts([LayerCost(1.0, 3.0)])
    for seconds in (1.0, 1.0, 6.0):
        costs.record(0, "forward", seconds)
    assert costs.costs()[0].forward == pytest.approx(2.0)


def test_nothing_is_allocated_for_a_guess():
    """Parameters on `meta` have a cost, too."""
    with torch.device("meta"):
        assert analytic_cost(nn.Linear(10_000, 10_000)).param_bytes == 4 * 10_000 * 10_001


def test_the_share_of_quick_layers_is_known_once_measured():
    """By the least of the last 8 forwards: not by what has not run, by backwards, or by a small batch long ago."""
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
    """bfloat16 parameters: 2 bytes for a gradient, and 4 for its sum where the optimizer works in float32."""
    layer = nn.Linear(8, 4, dtype=torch.bfloat16)
    assert analytic_cost(layer, lambda parameter: dtype).grad_bytes == 36 * per_number


def test_costs_of_layers_in_one_stage_are_added():
    assert LayerCost(1.0, 2.0, 3, 4) + LayerCost(0.5, 0.25, 10, 20) == LayerCost(1.5, 2.25, 13, 24)
