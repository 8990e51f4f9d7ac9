"""Tests of roundpipe_runtime.engine.digests."""

import math

import pytest
import torch

from roundpipe_runtime.engine.digests import digest, distance, typical

SHAPES = [(7,), (4096,), (5000,), (3, 4097), (1200, 900)]  # less than a row of the sums, one, and more than 128


def numbers(shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equal_gradients_are_at_no_distance(shape, dtype):
    """The factors are the same ones every time, and the memory order of a gradient does not matter."""
    one = numbers(shape, dtype=dtype)
    other = one.T.contiguous().T if one.dim() == 2 else one.clone()
    assert distance(digest(one, whole=0), digest(other, whole=0)) == 0.0
    assert digest(one, whole=0).norm == pytest.approx(one.double().norm().item(), rel=1e-5)
    assert len(digest(one, whole=0).values) == 16


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("error", [1e-9, 1e-4, 0.3])
@pytest.mark.parametrize("kind", ["all", "one", "row", "scale", "swap"])
def test_a_difference_is_estimated(shape, error, kind):
    gradient = numbers(shape)
    other = gradient.clone()
    if kind == "all":
        other += numbers(shape, 1) * error
    elif kind == "one":
        other.view(-1)[-1] += error
    elif kind == "row":
        other[-1] += error
    elif kind == "scale":
        other *= 1 + error
    else:
        other.view(-1)[:2] = other.view(-1)[:2].flip(0)
    exact = (other - gradient).norm().item() / gradient.norm().item()
    found = distance(digest(other, whole=0), digest(gradient, whole=0))
    assert exact / 3 < found < 3 * exact
    assert distance(digest(other), digest(gradient)) == pytest.approx(exact)


def test_a_difference_is_never_overlooked():
    """In 2000 random differences the estimate is within a factor of three, and right on average."""
    gradient = numbers((3, 5000))
    ratios = []
    for seed in range(2000):
        difference = numbers((3, 5000), seed + 1)
        difference[:, seed % 5000 :] = 0.0 if seed % 2 else difference[:, seed % 5000 :]
        found = distance(digest(gradient + difference, whole=0), digest(gradient, whole=0))
        ratios.append(found * gradient.norm().item() / difference.norm().item())
    assert 1 / 3 < min(ratios) <= max(ratios) < 3
    assert (torch.tensor(ratios) ** 2).mean().item() == pytest.approx(1.0, abs=0.05)


def test_two_numbers_that_differ_do_not_cancel():
    gradient = torch.zeros(3 * 4096, dtype=torch.float64)
    gradient[0] = 1.0
    right = digest(gradient, whole=0)
    found = []
    for place in [*range(1, 2000), 4096, 8192, 4097]:
        other = gradient.clone()
        other[0], other[place] = 0.0, 1.0
        found.append(distance(digest(other, whole=0), right))
    assert 2**0.5 / 5 < min(found) <= max(found) < 2**0.5 * 5


@pytest.mark.parametrize("whole", [None, 0])
def test_the_parts_of_a_gradient_add_up(whole):
    one, other = numbers((30, 500)), numbers((30, 500), 1)
    found = digest(one, whole=whole) + digest(other, whole=whole)
    expected = digest(one + other, whole=whole)
    assert distance(found, expected) < 1e-12
    assert found.norm == pytest.approx(expected.norm, rel=1e-12 if whole is None else 0.5)
    assert typical(expected) == pytest.approx((one + other).square().mean().sqrt().item())


@pytest.mark.parametrize("whole", [None, 0])
@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ([math.nan, 1.0], [math.nan, 1.0], False),
        ([math.inf, 1.0], [math.inf, 1.0], False),
        ([math.nan, 1.0], [0.0, 1.0], True),
        ([math.inf, 1.0], [-math.inf, 1.0], True),
        ([math.inf, 1.0], [math.nan, 1.0], True),
        ([math.nan, 1.0], [math.nan, 1.5], True),
        ([1.0, math.nan], [math.nan, 1.0], True),
    ],
)
def test_what_is_not_finite_is_compared_by_its_place(one, other, apart, whole):
    found = distance(digest(torch.tensor(one), whole=whole), digest(torch.tensor(other), whole=whole))
    assert (found > 0.1) == apart


@pytest.mark.parametrize("whole", [None, 0])
def test_numbers_whose_squares_overflow_are_finite(whole):
    """1e30 in bfloat16."""
    large = torch.full((5000,), 1e30, dtype=torch.bfloat16)
    found = digest(large, whole=whole)
    assert found.odd is None
    assert found.norm == pytest.approx(large.double().norm().item())
    assert distance(found, digest(large, whole=whole)) == 0.0


@pytest.mark.parametrize("whole", [None, 0])
def test_a_gradient_that_is_missing_is_one_of_zeros(whole):
    zeros, ones = digest(torch.zeros(9), whole=whole), digest(torch.ones(9), whole=whole)
    nothing = digest(torch.full((9,), math.nan), whole=whole)
    assert distance(None, zeros) == distance(zeros, None) == distance(None, None) == 0.0
    assert distance(None, ones) == distance(ones, None) == distance(nothing, None) == math.inf
    assert distance(ones, digest(torch.ones(3, 3), whole=whole)) == math.inf


@pytest.mark.parametrize("whole", [None, 0])
def test_sparse_and_complex_gradients_are_digested(whole):
    dense = numbers((40, 3))
    assert distance(digest(dense.to_sparse(), whole=whole), digest(dense, whole=whole)) == 0.0
    number = torch.complex(numbers((5000,)), numbers((5000,), 1))
    assert digest(number, whole=whole).norm == pytest.approx(number.norm().item())
    assert distance(digest(number.conj(), whole=whole), digest(number, whole=whole)) > 0.5


@pytest.mark.parametrize("whole", [None, 0], ids=["numbers", "sums"])
def test_parts_that_are_not_finite_add_up(whole):
    """Two parts have the digest of their sum, whatever of either is NaN or infinite (a tied embedding has two)."""
    odd = [torch.nan, torch.inf, -torch.inf, 0.5]
    one = torch.tensor([a for a in odd for _ in odd])
    other = torch.tensor([b for _ in odd for b in odd])
    parts = digest(one, whole=whole) + digest(other, whole=whole)
    if whole is None:
        assert distance(parts, digest(one + other)) == 0.0
    assert distance(parts, digest(torch.zeros(16), whole=whole)) == math.inf
    assert distance(parts, digest(one, whole=whole) + digest(other, whole=whole)) == 0.0
