"""The order of rows: another one in each epoch, the same one for the same seed, found again from any place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_runtime.fine_tune.trainer import Order


def taken(order, start, count):
    return [order[place] for place in range(start, start + count)]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own():
    rows = torch.arange(10, 30)
    order = Order(rows, seed=0)
    epochs = [taken(order, 20 * epoch, 20) for epoch in range(4)]
    assert all(sorted(epoch) == rows.tolist() for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


@given(st.integers(1, 9), st.integers(0, 40), st.integers(1, 25), st.integers(0, 5))
def test_a_place_says_all(count, start, more, seed):
    """A training that begins in the middle takes what one that was there from the start takes."""
    whole = taken(Order(torch.arange(count), seed=seed), 0, start + more)
    assert taken(Order(torch.arange(count), seed=seed), start, more) == whole[start:]


def test_going_back_gives_the_same_rows():
    order = Order(torch.arange(7), seed=1)
    first = taken(order, 3, 9)
    taken(order, 50, 2)
    assert taken(order, 3, 9) == first


@pytest.mark.parametrize("other", [1, 2, 1000])
def test_seeds_give_orders_that_do_not_meet(other):
    """Not even an epoch later: seed 1 does not begin with the second epoch of seed 0."""
    epochs = {tuple(taken(Order(torch.arange(30), seed=0), 30 * epoch, 30)) for epoch in range(5)}
    own = {tuple(taken(Order(torch.arange(30), seed=other), 30 * epoch, 30)) for epoch in range(5)}
    assert not epochs & own


def test_the_generator_of_the_process_is_not_touched():
    state = torch.get_rng_state()
    taken(Order(torch.arange(30), seed=0), 0, 60)
    assert torch.equal(torch.get_rng_state(), state)
