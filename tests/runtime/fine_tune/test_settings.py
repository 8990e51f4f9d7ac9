"""How a training goes: its steps, its learning rate, the order of its rows, and what cannot be."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_runtime import ConfigError
from roundpipe_runtime.fine_tune import Settings
from roundpipe_runtime.fine_tune.trainer import Order


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"warmup": 4}, [0.5, 1.0, 1.5, 2.0, *(1 + math.cos(math.pi * step / 4) for step in range(4))]),
        ({"warmup": 0, "schedule": "linear"}, [2.0, 1.5, 1.0, 0.5]),
        ({"warmup": 0, "schedule": "constant"}, [2.0, 2.0, 2.0, 2.0]),
        ({"warmup": 4, "schedule": "linear"}, [0.5, 1.0]),
    ],
)
def test_the_rate_rises_in_a_line_and_falls_along_its_schedule(options, expected):
    """The first step learns already, the last one still does; a warm-up longer than the training only rises."""
    settings = Settings(lr=2.0, **options)
    assert [2.0 * settings.rate(step, len(expected)) for step in range(len(expected))] == pytest.approx(expected)


@pytest.mark.parametrize(("steps", "warmup"), [(5, 0), (50, 5), (5000, 100)])
def test_a_tenth_of_the_steps_is_warm_up(steps, warmup):
    found = [Settings().rate(step, steps) for step in range(steps)]
    assert found.index(max(found)) == max(warmup - 1, 0)


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 3), ({"epochs": 2}, 5), ({"accumulate": 3}, 1), ({"steps": 77, "epochs": 2}, 77)]
)
def test_steps_come_from_epochs_unless_they_are_given(options, expected):
    assert Settings(**options).total_steps(20) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 0}, "batch must be a whole number of at least 1, found 0"),
        ({"warmup": -1}, "warmup must be a whole number of at least 0"),
        ({"eval_every": 1.5}, "eval_every must be a whole number of at least 1, found 1.5"),
        ({"lr": 0.0}, "lr must be a number above 0"),
        ({"lr": -1.0}, "lr must be a number above 0"),
        ({"lr": math.inf}, "lr must be a number above 0"),
        ({"clip": -1.0}, "clip must be a number of at least 0"),
        ({"weight_decay": math.nan}, "weight_decay must be a number of at least 0"),
        ({"schedule": "stairs"}, '"cosine", "linear" or "constant", found \'stairs\''),
        ({"batch": 4, "microbatches": 8}, "4 rows cannot be split into 8 microbatches.*--batch 8, or --microbatches 4"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        Settings(**options)


def taken(order, start, count):
    return [order[place] for place in range(start, start + count)]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own():
    """Seeds give orders that do not meet, not even an epoch later; the generator of the process is not touched."""
    rows, state = torch.arange(10, 30), torch.get_rng_state()
    epochs = {
        seed: [tuple(taken(Order(rows, seed=seed), 20 * epoch, 20)) for epoch in range(5)] for seed in (0, 1, 2, 1000)
    }
    assert all(sorted(epoch) == rows.tolist() for found in epochs.values() for epoch in found)
    assert len({epoch for found in epochs.values() for epoch in found}) == 4 * 5
    assert torch.equal(torch.get_rng_state(), state)


@given(st.integers(1, 9), st.integers(0, 40), st.integers(1, 25), st.integers(0, 5))
def test_a_place_says_all(count, start, more, seed):
    """A training that begins in the middle takes what one that was there from the start takes; going back, too."""
    order = Order(torch.arange(count), seed=seed)
    whole = taken(order, 0, start + more)
    assert taken(Order(torch.arange(count), seed=seed), start, more) == whole[start:]
    assert taken(order, 0, start + more) == whole
