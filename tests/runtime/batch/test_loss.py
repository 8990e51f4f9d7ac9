"""The total and the gradient of a batch in microbatches are those of the batch at once."""

import math
import re
import warnings

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_runtime.batch.loss import LossContract, WeightedLoss, read_loss, warn_if_uneven
from roundpipe_runtime.batch.spec import sizes
from roundpipe_runtime.errors import ConfigError, LossError, UnevenSplitWarning
from roundpipe_runtime.pipeline.roundpipe import back_from


def learning(value):
    return torch.tensor(value, requires_grad=True)


def train(reduction, rows, loss_fn, *, model=None):
    """What the engine does, without stages: a loss and a backward per microbatch, then the scale."""
    model = torch.nn.Linear(3, 2).double() if model is None else model
    contract = LossContract(reduction, rows)
    starts = [sum(rows[:index]) for index in range(len(rows))]
    for index, (start, count) in enumerate(zip(starts, rows, strict=True)):
        for term in contract.add(index, loss_fn(model, slice(start, start + count))):
            torch.autograd.backward(term.tensor, term.seed)
    scale = contract.gradient_scale()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad * scale for p in model.parameters()]
    return contract.total(), grads


def plain(loss, model):
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, model.parameters(), strict=True)]


@given(batch=st.integers(1, 17), count=st.integers(1, 8), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_mean_is_the_mean_of_the_whole_batch(batch, count, seed):
    torch.manual_seed(seed)
    x, y = torch.randn(batch, 3).double(), torch.randn(batch, 2).double()
    model = torch.nn.Linear(3, 2).double()
    total, grads = train("mean", sizes(batch, count), lambda m, s: ((m(x[s]) - y[s]) ** 2).mean(), model=model)
    expected = ((model(x) - y) ** 2).mean()
    torch.testing.assert_close(total, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(grads, plain(expected, model), rtol=1e-10, atol=1e-12)


@given(batch=st.integers(1, 17), count=st.integers(1, 8), seed=st.integers(0, 99), as_tensor=st.booleans())
@settings(max_examples=40)
def test_pairs_are_exact_whatever_is_ignored(batch, count, seed, as_tensor):
    """Labels of -100 anywhere, whole microbatches of them included."""
    torch.manual_seed(seed)
    x, y = torch.randn(batch, 3).double(), torch.randint(0, 2, (batch,))
    y[torch.rand(batch) < 0.6] = -100
    model = torch.nn.Linear(3, 2).double()

    def loss_fn(m, s):
        summed = torch.nn.functional.cross_entropy(m(x[s]), y[s], reduction="sum")
        counted = (y[s] != -100).sum()
        return summed, counted if as_tensor else counted.item()

    total, grads = train("sum", sizes(batch, count), loss_fn, model=model)
    if (y == -100).all():
        assert total.item() == 0.0
        assert all(not grad.any() for grad in grads)
        return
    expected = torch.nn.functional.cross_entropy(model(x), y)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(grads, plain(expected, model), rtol=1e-10, atol=1e-12)


def test_sum_is_the_sum_over_microbatches():
    """The documented behaviour: a script divides by the number of microbatches itself."""
    contract = LossContract("sum", [2, 2])
    assert [contract.add(i, learning(float(i + 1)) / 2)[0].seed.item() for i in range(2)] == [1.0, 1.0]
    assert contract.total().item() == 1.5
    assert contract.gradient_scale() == 1.0


def test_a_sequence_gives_one_total_per_loss():
    contract = LossContract("mean", [3, 1])
    contract.add(0, [learning(1.0), learning(2.0)])
    contract.add(1, (learning(5.0), learning(6.0)))
    assert [t.item() for t in contract.total()] == [2.0, 3.0]


def test_a_microbatch_without_weight_contributes_nothing_even_if_it_is_nan():
    """Nothing goes back from it: zero times NaN would be NaN."""
    contract = LossContract("sum", [1, 1])
    assert contract.add(0, WeightedLoss(learning(math.nan), 0)) == []
    (term,) = contract.add(1, WeightedLoss(learning(6.0), 3))
    assert contract.total().item() == 2.0
    assert term.seed.item() * contract.gradient_scale() == pytest.approx(1 / 3)


def test_no_weight_at_all_is_zero():
    contract = LossContract("sum", [1, 1])
    assert [contract.add(i, (learning(math.nan), 0)) for i in range(2)] == [[], []]
    assert contract.total().item() == 0.0
    assert contract.gradient_scale() == 0.0


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


def test_a_number_for_nothing_does_not_decide_the_dtype():
    """A microbatch without tokens may return `(0.0, 0)`."""
    contract = LossContract("sum", [1, 1])
    contract.add(0, (0.0, 0))
    contract.add(1, (learning(6.0).double(), 3))
    assert contract.total().dtype is torch.float64
    assert contract.total().item() == 2.0


def test_weights_average_the_outputs():
    pairs, plain_losses = LossContract("sum", [2, 1]), LossContract("sum", [2, 1])
    for index in range(2):
        pairs.add(index, (learning(1.0), 10 * index))
        plain_losses.add(index, learning(1.0))
    assert pairs.weights == [0.0, 10.0]
    assert plain_losses.weights == [2.0, 1.0]


def test_the_total_has_dtype_and_no_graph():
    contract = LossContract("mean", [1, 1])
    for index in range(2):
        contract.add(index, learning(1.0).half())
    assert contract.total().dtype is torch.float16
    assert not contract.total().requires_grad


def test_a_loss_that_does_not_learn_goes_nowhere():
    contract = LossContract("sum", [1])
    assert contract.add(0, torch.tensor(2.0)) == []
    assert contract.total().item() == 2.0


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (learning(1.0), "tensor"),
        (WeightedLoss(learning(1.0), 2), "pair"),
        (WeightedLoss(torch.tensor(1.0), torch.tensor(2.0)), "pair"),
        ((learning(1.0), 2), "pair"),
        ((learning(1.0), torch.tensor(2)), "pair"),
        ((learning(1.0), torch.tensor(2.0)), "pair"),
        ((torch.tensor(1.0), torch.tensor(2)), "pair"),
        ((0.0, 0), "pair"),
        ((learning(1.0), numpy.int64(2)), "pair"),
        ((learning(1.0), learning(2.0)), "sequence"),
        ([learning(1.0), torch.tensor(2.0)], "sequence"),
        ([torch.tensor(1.0), torch.tensor(2.0)], "sequence"),
        ((learning(1.0),), "sequence"),
        ((learning(1.0), learning(2.0), torch.tensor(3.0)), "sequence"),
    ],
)
def test_what_a_loss_function_may_return(value, kind):
    assert read_loss(value).kind == kind


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
            "a loss must be one number. Without loss_fn=, the output of the model is the loss: pass loss_fn=.",
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


def test_kinds_that_differ_between_microbatches_are_refused():
    contract = LossContract("sum", [1, 1])
    contract.add(0, learning(1.0))
    with pytest.raises(LossError, match=r"a pair \(sum, weight\) for microbatch 1, and a tensor for microbatch 0"):
        contract.add(1, (learning(1.0), 2))


def test_errors_name_the_microbatch():
    with pytest.raises(LossError, match=r"^microbatch 1: loss_fn must return"):
        LossContract("sum", [1, 1]).add(1, None)


def test_a_missing_microbatch_is_named():
    contract = LossContract("sum", [1, 1])
    contract.add(1, learning(1.0))
    with pytest.raises(LossError, match=r"microbatches \[0\] is missing"):
        contract.total()


def test_mean_needs_rows():
    with pytest.raises(LossError, match="weights microbatches by their rows"):
        LossContract("mean", [1, None]).add(0, learning(1.0))


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ConfigError, match='loss_reduction must be "sum" or "mean", found \'none\''):
        LossContract("none", [1])


@pytest.mark.parametrize(("rows", "count"), [([3, 3, 2, 2], 4), ([1, 1], 4)])
def test_an_uneven_split_warns_with_both_ways_out(rows, count):
    """10 rows in 4, and 2 rows in 4: a mean divided by 4 is wrong in both."""
    with pytest.warns(UnevenSplitWarning, match='(?s)loss_reduction="mean".*WeightedLoss') as caught:
        assert warn_if_uneven(rows, count)
    assert caught[0].filename == __file__


def test_an_even_split_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not warn_if_uneven([2, 2, 2], 3)


def test_the_loss_of_a_whole_batch_is_divided_by_its_weight():
    outputs = torch.tensor([6.0], requires_grad=True)
    total = back_from(outputs, None, lambda outputs, _: WeightedLoss(outputs.sum(), 3), return_outputs=False)
    assert (total.item(), outputs.grad.item()) == (2.0, pytest.approx(1 / 3))
