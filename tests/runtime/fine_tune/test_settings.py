"""How a training goes: its steps, its learning rate, and what cannot be."""

import math

import pytest

from roundpipe_runtime import ConfigError
from roundpipe_runtime.fine_tune import Settings


def rates(steps, **options):
    settings = Settings(lr=2.0, **options)
    return [settings.lr * settings.rate(step, steps) for step in range(steps)]


def test_the_rate_rises_in_a_line_and_falls_along_a_cosine():
    """The first step learns already; the last one still does."""
    expected = [0.5, 1.0, 1.5, 2.0, *(1 + math.cos(math.pi * step / 4) for step in range(4))]
    assert rates(8, warmup=4) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("schedule", "expected"), [("linear", [2.0, 1.5, 1.0, 0.5]), ("constant", [2.0, 2.0, 2.0, 2.0])]
)
def test_the_other_ways_to_fall(schedule, expected):
    assert rates(4, warmup=0, schedule=schedule) == expected


@pytest.mark.parametrize(("steps", "warmup"), [(5, 0), (50, 5), (5000, 100)])
def test_a_tenth_of_the_steps_is_warm_up(steps, warmup):
    """A hundred at most."""
    found = rates(steps)
    assert found.index(max(found)) == max(warmup - 1, 0)


def test_a_warm_up_longer_than_the_training_only_rises():
    assert rates(2, warmup=4) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 3), ({"epochs": 2}, 5), ({"accumulate": 3}, 1), ({"steps": 77, "epochs": 2}, 77)]
)
def test_steps_come_from_epochs_unless_they_are_given(options, expected):
    """Twenty rows, eight in a batch; the last batch of the last epoch is filled."""
    assert Settings(**options).total_steps(20) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 0}, "batch must be a number of at least 1, found 0"),
        ({"steps": 0}, "steps must be a number of at least 1"),
        ({"warmup": -1}, "warmup must be a number of at least 0"),
        ({"eval_every": 1.5}, "eval_every must be a number of at least 1, found 1.5"),
        ({"lr": 0.0}, "lr must be a number above 0"),
        ({"lr": math.inf}, "lr must be a number above 0"),
        ({"clip": -1.0}, "clip must be a number of at least 0"),
        ({"weight_decay": math.nan}, "weight_decay must be a number of at least 0"),
        ({"schedule": "stairs"}, '"cosine", "linear" or "constant", found \'stairs\''),
        ({"batch": 4, "microbatches": 8}, "4 rows cannot be split into 8 microbatches.*--batch 8, or --microbatches 4"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    """With the name of the field and what was found."""
    with pytest.raises(ConfigError, match=words):
        Settings(**options)
