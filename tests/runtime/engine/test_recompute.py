"""Recomputed layers: their random numbers and saved data, and digests that compare two computations."""

import math

import pytest
import torch
from torch import nn

from roundpipe_runtime import doing_recompute, get_recompute_data, save_for_recompute
from roundpipe_runtime.engine.digests import digest, distance, typical
from roundpipe_runtime.engine.recomputed import VisitGenerator, call_seed, run_seeded
from roundpipe_runtime.errors import StageError
from tests.runtime.small import all_recomputed, batch, relative_error, without_row_check

F = nn.functional
CPU = torch.device("cpu")


def test_seeds_differ_in_every_part():
    parts = [(0, "", 0, 0), (1, "", 0, 0), (0, "a", 0, 0), (0, "", 1, 0), (0, "", 0, 1)]
    assert len({call_seed(*part) for part in parts}) == len(parts)


@pytest.mark.parametrize("draws", ["nothing", "layer", "loss"])
def test_the_callers_generator_moves_by_one_number_if_a_layer_or_the_loss_draws(pipe, draws):
    model = pipe(nn.Linear(4, 4), nn.Dropout(0.5) if draws == "layer" else nn.Identity(), nn.Linear(4, 3))
    inputs, labels = batch(4)

    def loss_fn(outputs, labels):
        return (torch.rand_like(outputs) * outputs).mean() if draws == "loss" else F.mse_loss(outputs, labels)

    torch.manual_seed(3)
    if draws != "nothing":
        torch.empty((), dtype=torch.int64).random_()
    expected, found = torch.get_rng_state(), []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(model.forward_backward((inputs,), label=labels, loss_fn=loss_fn, run_config=all_recomputed(2)))
        assert torch.equal(torch.get_rng_state(), expected)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(1),
        lambda: torch.randn(()),  # the second number of a pair, which is kept from the one drawn before
        lambda: torch.empty(624, dtype=torch.int32).random_(),  # as many words as the generator has
        lambda: torch.randperm(3),
        lambda: torch.manual_seed(5),
    ],
)
def test_whatever_changes_the_generator_is_noticed(draw):
    """Only parts of its state are compared; each way to change it is seen in them, and undone."""

    class Sometimes(nn.Module):
        draws = False

        def forward(self):
            return draw() if self.draws else None

    layer = Sometimes()
    torch.manual_seed(3)
    torch.randn(())
    before = torch.get_rng_state()
    run_seeded(layer, layer, lambda: 1, VisitGenerator(CPU), layer)
    layer.draws, calls = True, []
    run_seeded(layer, layer, lambda: 2, VisitGenerator(CPU), lambda: calls.append(layer()))
    assert len(calls) == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_a_call_that_is_repeated_saves_its_data_once_more(pipe):
    """A layer that draws for the first time is called again; its recomputation gets what the second call saved."""
    drawn, found = [], []

    class Saves(nn.Module):
        draws = False

        def forward(self, x):
            if doing_recompute():
                found.append(get_recompute_data()[0])
                return x * found[-1]
            drawn.append((torch.rand(1) if self.draws else torch.ones(1)).to(x.device))
            save_for_recompute(drawn[-1])
            return x * drawn[-1]

    model = without_row_check(pipe(Saves(), nn.Linear(4, 3)))
    for draws in (False, True):
        model[0].draws = draws
        train(model, all_recomputed(1))
    # two microbatches; then the first one of the second run is called twice
    assert len(drawn) == 5
    assert [one.item() for one in found] == [one.item() for one in [*drawn[:2], *drawn[3:]]]


class Keeps(nn.Module):
    """Finds the positive entries once."""

    def __init__(self, calls):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.note = calls.append  # a list would be what it was before the recomputation

    def forward(self, x):
        if doing_recompute():
            (mask,) = get_recompute_data()
        else:
            mask = x > 0
            save_for_recompute(mask)
        self.note(doing_recompute())
        return self.scale * x * mask


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_kept_data_is_there_in_the_recomputation(pipe, grain):
    calls = []
    model = without_row_check(pipe(Keeps(calls), nn.Linear(4, 3)))
    train(model, all_recomputed(1, recompute_grain=grain))
    assert sorted(calls) == [False, False, True, True]
    found = model[0].scale.grad.clone()
    model[0].scale.grad = None
    inputs, labels = batch(4)
    F.mse_loss(model[1](model[0].scale * inputs.relu()), labels).backward()
    assert relative_error(found, model[0].scale.grad) < 1e-6


def train(model, config):
    inputs, labels = batch(4)
    return model.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)


def test_keeping_outside_of_a_pipeline_does_nothing():
    assert not doing_recompute()
    Keeps([])(torch.ones(2))
    with pytest.raises(StageError, match="doing_recompute"):
        get_recompute_data()


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (lambda x: (save_for_recompute(1), save_for_recompute(2)), "was already called"),
        (lambda x: save_for_recompute(x * 2), "requires a gradient"),
    ],
)
def test_what_cannot_be_kept_is_refused(pipe, keep, message):
    """Twice in one call, or with a gradient that would be lost."""

    class Layer(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            keep(out)
            return out

    with pytest.raises(StageError, match=message):
        train(pipe(Layer(4, 4), nn.Linear(4, 3)), all_recomputed(1))


SHAPES = [(7,), (4096,), (5000,), (3, 4097), (1200, 900)]  # less than a row of the sums, one, and more than 128


def numbers(shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equal_gradients_are_at_no_distance(shape, dtype):
    """The factors are the same ones every time, and neither memory order nor a sparse layout matters."""
    one = numbers(shape, dtype=dtype)
    for other in (one.T.contiguous().T if one.dim() == 2 else one.clone(), one.to_sparse()):
        for whole in (None, 0):
            assert distance(digest(one, whole=whole), digest(other, whole=whole)) == 0.0
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
    assert exact / 3 < distance(digest(other, whole=0), digest(gradient, whole=0)) < 3 * exact
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


@pytest.mark.parametrize("whole", [None, 0], ids=["numbers", "sums"])
def test_the_parts_of_a_gradient_add_up(whole):
    """Two parts have the digest of their sum, whatever of either is NaN or infinite (a tied embedding has two)."""
    one, other = numbers((30, 500)), numbers((30, 500), 1)
    found = digest(one, whole=whole) + digest(other, whole=whole)
    expected = digest(one + other, whole=whole)
    assert distance(found, expected) < 1e-12
    assert found.norm == pytest.approx(expected.norm, rel=1e-12 if whole is None else 0.5)
    assert typical(expected) == pytest.approx((one + other).square().mean().sqrt().item())
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.5])
    one, other = odd.repeat_interleave(4), odd.repeat(4)
    parts = digest(one, whole=whole) + digest(other, whole=whole)
    if whole is None:
        assert distance(parts, digest(one + other)) == 0.0
    assert distance(parts, digest(torch.zeros(16), whole=whole)) == math.inf
    assert distance(parts, digest(one, whole=whole) + digest(other, whole=whole)) == 0.0


@pytest.mark.parametrize("whole", [None, 0])
@pytest.mark.parametrize(("one", "other", "apart"), [
    ([math.nan, 1.0], [math.nan, 1.0], False), ([math.inf, 1.0], [math.inf, 1.0], False),
    ([math.nan, 1.0], [0.0, 1.0], True), ([math.inf, 1.0], [-math.inf, 1.0], True),
    ([math.inf, 1.0], [math.nan, 1.0], True), ([math.nan, 1.0], [math.nan, 1.5], True),
    ([1.0, math.nan], [math.nan, 1.0], True),
])  # fmt: skip
def test_what_is_not_finite_is_compared_by_its_place(one, other, apart, whole):
    found = distance(digest(torch.tensor(one), whole=whole), digest(torch.tensor(other), whole=whole))
    assert (found > 0.1) == apart


@pytest.mark.parametrize("whole", [None, 0])
def test_numbers_whose_squares_overflow_missing_and_complex_ones_are_digested(whole):
    """1e30 in bfloat16 is finite; a gradient that is missing is one of zeros."""
    large = torch.full((5000,), 1e30, dtype=torch.bfloat16)
    found = digest(large, whole=whole)
    assert found.odd is None
    assert found.norm == pytest.approx(large.double().norm().item())
    assert distance(found, digest(large, whole=whole)) == 0.0
    zeros, ones = digest(torch.zeros(9), whole=whole), digest(torch.ones(9), whole=whole)
    nothing = digest(torch.full((9,), math.nan), whole=whole)
    assert distance(None, zeros) == distance(zeros, None) == distance(None, None) == 0.0
    assert distance(None, ones) == distance(ones, None) == distance(nothing, None) == math.inf
    assert distance(ones, digest(torch.ones(3, 3), whole=whole)) == math.inf
    number = torch.complex(numbers((5000,)), numbers((5000,), 1))
    assert digest(number, whole=whole).norm == pytest.approx(number.norm().item())
    assert distance(digest(number.conj(), whole=whole), digest(number, whole=whole)) > 0.5
