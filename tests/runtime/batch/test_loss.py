"""The total and the gradient of a batch in microbatches are those of the batch at once."""

import math
import re

import numpy
import pytest
import torch

from roundpipe_runtime.batch.loss import LossContract, WeightedLoss, read_loss, warn_if_uneven
from roundpipe_runtime.errors import ConfigError, LossError, UnevenSplitWarning


def learning(value):
    return torch.tensor(value, requires_grad=True)


def test_totals_of_microbatches():
    """A sum is that over microbatches, as documented: a script divides by their number itself."""
    contract = LossContract("sum", [2, 2])
    assert [contract.add(i, learning(float(i + 1)) / 2)[0].seed.item() for i in range(2)] == [1.0, 1.0]
    assert (contract.total().item(), contract.gradient_scale()) == (1.5, 1.0)
    contract = LossContract("mean", [3, 1])
    contract.add(0, [learning(1.0), learning(2.0).half()])
    contract.add(1, (learning(5.0), learning(6.0).half()))
    assert [(t.item(), t.dtype, t.requires_grad) for t in contract.total()] == [
        (2.0, torch.float32, False), (3.0, torch.float16, False),
    ]  # fmt: skip
    contract = LossContract("sum", [1])
    assert contract.add(0, torch.tensor(2.0)) == []  # which learns nothing
    assert contract.total().item() == 2.0


def test_a_microbatch_without_weight_contributes_nothing_even_if_it_is_nan():
    """Nothing goes back from it: zero times NaN would be NaN. A number for nothing does not decide the dtype."""
    for nothing in (WeightedLoss(learning(math.nan), 0), (0.0, 0)):
        contract = LossContract("sum", [1, 1])
        assert contract.add(0, nothing) == []
        (term,) = contract.add(1, WeightedLoss(learning(6.0).double(), 3))
        assert (contract.total().item(), contract.total().dtype) == (2.0, torch.float64)
        assert term.seed.item() * contract.gradient_scale() == pytest.approx(1 / 3)
    contract = LossContract("sum", [1, 1])
    assert [contract.add(i, (learning(math.nan), 0)) for i in range(2)] == [[], []]
    assert (contract.total().item(), contract.gradient_scale()) == (0.0, 0.0)


def test_the_seed_of_a_pair_is_a_power_of_two():
    """Multiplying with it does not round, so the order of scaling does not show in the gradient."""
    (term,) = LossContract("sum", [5, 5, 3]).add(0, (learning(1.0), 7))
    assert math.frexp(term.seed.item())[0] == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_of_a_short_loss_is_not_rounded_with_its_seed(dtype):
    """3 of 10 rows are 0.3008 in bfloat16: a whole microbatch would weigh a quarter of a percent too much."""
    contract = LossContract("mean", [3, 3, 2, 2])
    seeds = [contract.add(i, learning(1.0).to(dtype))[0].seed.item() for i in range(4)]
    assert [seed * contract.gradient_scale() for seed in seeds] == pytest.approx([0.3, 0.3, 0.2, 0.2], rel=1e-15)


def test_weights_average_the_outputs():
    pairs, plain_losses = LossContract("sum", [2, 1]), LossContract("sum", [2, 1])
    for index in range(2):
        pairs.add(index, (learning(1.0), 10 * index))
        plain_losses.add(index, learning(1.0))
    assert pairs.weights == [0.0, 10.0]
    assert plain_losses.weights == [2.0, 1.0]


RETURNED = {
    "tensor": [learning(1.0)],
    "pair": [
        WeightedLoss(learning(1.0), 2), WeightedLoss(torch.tensor(1.0), torch.tensor(2.0)), (learning(1.0), 2),
        (learning(1.0), torch.tensor(2)), (learning(1.0), torch.tensor(2.0)), (torch.tensor(1.0), torch.tensor(2)),
        (0.0, 0), (learning(1.0), numpy.int64(2)),
    ],
    "sequence": [
        (learning(1.0), learning(2.0)), [learning(1.0), torch.tensor(2.0)], [torch.tensor(1.0), torch.tensor(2.0)],
        (learning(1.0),), (learning(1.0), learning(2.0), torch.tensor(3.0)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", RETURNED)
def test_what_a_loss_function_may_return(kind):
    assert {read_loss(value).kind for value in RETURNED[kind]} == {kind}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "loss_fn must return a tensor, a sequence of tensors or a pair (sum, weight), found NoneType."),
        ({"loss": 1}, "found dict."),
        ([], "found list of []."),
        (("a", 2), "found tuple of ['str', 'int']."),
        ([1.0, 2.0], "found list of ['float', 'float']."),
        ((torch.tensor(1.0), torch.tensor(2.0)), "Two losses and a sum with its weight look the same."),
        (
            torch.zeros(3),
            "a loss must be one number. Without loss_fn=, the output of the model is used as the loss, so pass",
        ),
        ([torch.zeros(()), torch.zeros(2)], "loss 1 has shape (2,)"),
        (WeightedLoss(learning(1.0), learning(2.0)), "return WeightedLoss(total, weight.detach())"),
        ((learning(1.0), -1), "must be a finite number of at least 0, found -1."),
        ((learning(1.0), math.nan), "must be a finite number of at least 0, found nan."),
        (WeightedLoss(learning(1.0), "2"), "must be a finite number of at least 0, found '2'."),
    ],
)
def test_what_it_may_not_return(value, message):
    with pytest.raises(LossError, match=re.escape(message)):
        read_loss(value)


def test_microbatches_that_do_not_go_together_are_refused():
    contract = LossContract("sum", [1, 1])
    with pytest.raises(LossError, match=r"^microbatch 1: loss_fn must return"):
        contract.add(1, None)
    contract.add(1, learning(1.0))
    with pytest.raises(LossError, match=r"Microbatches \[0\] have no loss yet"):
        contract.total()
    with pytest.raises(LossError, match=r"a pair \(sum, weight\) for microbatch 0, and a tensor for microbatch 1"):
        contract.add(0, (learning(1.0), 2))
    with pytest.raises(LossError, match="weights microbatches by their rows"):
        LossContract("mean", [1, None]).add(0, learning(1.0))
    with pytest.raises(ConfigError, match='loss_reduction must be "sum" or "mean", found \'none\''):
        LossContract("none", [1])


@pytest.mark.parametrize(("rows", "count"), [([3, 3, 2, 2], 4), ([1, 1], 4)])
def test_an_uneven_split_warns_with_both_ways_out(rows, count):
    """10 rows in 4, and 2 rows in 4: a mean divided by 4 is wrong in both; not so where all have as many."""
    with pytest.warns(UnevenSplitWarning, match='(?s)loss_reduction="mean".*WeightedLoss') as caught:
        assert warn_if_uneven(rows, count)
    assert caught[0].filename == __file__
    assert not warn_if_uneven([2, 2, 2], 3)
