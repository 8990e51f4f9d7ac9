"""Matrices rounded by what they multiply: products change less than with rounding to nearest."""

import itertools

import numpy
import pytest
import torch

from yobx_flatten.export.onnx.rounding import round_with_feedback


def _inputs(count: int, size: int, rank: int) -> torch.Tensor:
    """Inputs that mostly go together, as those of a model do."""
    draw = torch.Generator().manual_seed(3)
    mixed = torch.randn(count, rank, generator=draw) @ torch.randn(rank, size, generator=draw)
    return mixed + 0.1 * torch.randn(count, size, generator=draw)


def _weights(size: int, columns: int) -> torch.Tensor:
    return torch.randn(size, columns, generator=torch.Generator().manual_seed(5))


def _nearest(weights: torch.Tensor, size: int) -> torch.Tensor:
    """Whole steps of a fifteenth of a block's range, with a whole number for 0: written out again."""
    blocks = weights.reshape(-1, size, weights.shape[1])
    low, high = blocks.amin(1, keepdim=True).clamp(max=0), blocks.amax(1, keepdim=True).clamp(min=0)
    step = (high - low) / 15
    zero = torch.round(-low / step)
    return ((torch.round(blocks / step) + zero).clamp(0, 15) - zero).mul(step).reshape(weights.shape)


def _loss(inputs: torch.Tensor, weights: torch.Tensor, found: torch.Tensor) -> float:
    return float((inputs @ (weights - found)).square().mean())


@pytest.mark.parametrize("rank", [4, 16, 64])
def test_products_change_less_than_with_rounding_to_nearest(rank):
    """On inputs that were not read: at most half the error, and less where inputs go together."""
    inputs, weights = _inputs(4096, 128, rank), _weights(128, 48)
    seen, others = inputs[:2048], inputs[2048:]
    found = torch.from_numpy(round_with_feedback(weights, seen.T @ seen / 2048, 32).weights()).T
    allowed = {4: 0.15, 16: 0.3, 64: 0.75}[rank]
    assert _loss(others, weights, found) < allowed * _loss(others, weights, _nearest(weights, 32))


def test_the_numbers_are_near_the_best_of_all():
    """Of four weights in the steps that were chosen all 16 ** 4 choices are tried: most of the gain is reached."""
    inputs, columns = _inputs(512, 16, 2)[:, :4], 24
    weights, moments = _weights(4, columns), inputs.T @ inputs / len(inputs)
    grid = round_with_feedback(weights, moments, 4)
    assert grid.lowest is None
    choices = torch.tensor(list(itertools.product(range(16), repeat=4)), dtype=torch.float32)
    gaps = torch.zeros(2)
    for column, found in enumerate(grid.weights()):
        zero, scale = float(grid.zeros[column, 0]), float(grid.scales[column, 0])
        own = weights[:, column]
        nearest = ((own / scale).round() + zero).clamp(0, 15)
        errors = torch.cat([choices, nearest[None]]).sub(zero).mul(scale) - own
        losses = ((errors @ moments) * errors).sum(1)
        error = torch.from_numpy(found) - own
        reached, best = float(error @ moments @ error), float(losses[:-1].min())
        assert reached >= best - 1e-6
        gaps += torch.tensor([reached - best, float(losses[-1]) - best])
    assert gaps[0] < 0.4 * gaps[1]


def test_inputs_that_say_nothing_leave_rounding_to_nearest_steps():
    """Independent inputs of one size: each weight is the nearest of its block's steps."""
    weights = _weights(64, 40)
    grid = round_with_feedback(weights, torch.eye(64), 32)
    scales = numpy.repeat(grid.scales, 32, 1)
    zeros = numpy.repeat(grid.zeros.astype(numpy.float32), 32, 1)
    expected = (numpy.rint(weights.numpy().T / scales) + zeros).clip(0, 15)
    assert (grid.numbers.reshape(40, 64) == expected).all()


def test_weights_near_a_lowest_weight_and_steps_keep_them():
    """Weights of Q4_1, moved by a two thousandth each: a whole number for 0 would cost 30 times as much."""
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 16, (8, 32, 24), generator=draw).float()
    numbers[:, 0], numbers[:, 1] = 0, 15
    exact = (numbers * 0.013 - 0.07 - torch.rand(8, 1, 24, generator=draw) * 0.02).reshape(256, 24)
    weights = exact * (1 + (torch.rand(256, 24, generator=draw) - 0.5) * 1e-3)
    inputs = _inputs(1024, 256, 32)
    grid = round_with_feedback(weights, inputs.T @ inputs / 1024, 32)
    assert grid.lowest is not None
    assert grid.lowest.dtype == numpy.float16
    assert float(numpy.abs(grid.weights().T - weights.numpy()).max()) < 0.05 * 0.013


@pytest.mark.parametrize(
    "moments",
    [torch.zeros(32, 32), torch.full((32, 32), 2.0), torch.full((32, 32), float("inf")), torch.eye(32) * 1e-20],
    ids=["zeros", "all the same", "infinite", "tiny"],
)
def test_moments_without_an_inverse_give_finite_weights(moments):
    weights = _weights(32, 8)
    found = round_with_feedback(weights, moments, 32).weights().T
    assert bool((numpy.abs(found - weights.numpy()) <= numpy.ptp(weights.numpy(), 0)).all())
    assert not round_with_feedback(torch.zeros(32, 8), moments, 32).weights().any()
