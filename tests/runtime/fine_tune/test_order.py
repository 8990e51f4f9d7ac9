"""The order of rows: another one in each epoch, the same one for the same seed, found again from any place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_runtime.fine_tune.order import Order


def test_each_epoch_has_every_row_once_in_an_order_of_its_own():
    rows = torch.arange(10, 30)
    order = Order(rows, seed=0)
    epochs = [order.take(20 * epoch, 20).tolist() for epoch in range(4)]
    assert all(sorted(epoch) == rows.tolist() for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


@given(st.integers(1, 9), st.integers(0, 40), st.integers(1, 25), st.integers(0, 5))
def test_a_place_says_all(count, start, taken, seed):
    """Whoever begins in the middle takes what one that was there from the start takes."""
    whole = Order(torch.arange(count), seed=seed).take(0, start + taken)
    assert Order(torch.arange(count), seed=seed).take(start, taken).tolist() == whole[start:].tolist()


def test_going_back_gives_the_same_rows():
    order = Order(torch.arange(7), seed=1)
    first = order.take(3, 9).tolist()
    order.take(50, 2)
    assert order.take(3, 9).tolist() == first


@pytest.mark.parametrize("other", [1, 2, 1000])
def test_seeds_give_orders_that_do_not_meet(other):
    """Not even an epoch later: seed 1 does not begin with the second epoch of seed 0."""
    epochs = {tuple(Order(torch.arange(30), seed=0).take(30 * epoch, 30).tolist()) for epoch in range(5)}
    own = {tuple(Order(torch.arange(30), seed=other).take(30 * epoch, 30).tolist()) for epoch in range(5)}
    assert not epochs & own


def test_the_generator_of_the_process_is_not_touched():
    state = torch.get_rng_state()
    Order(torch.arange(30), seed=0).take(0, 60)
    assert torch.equal(torch.get_rng_state(), state)
