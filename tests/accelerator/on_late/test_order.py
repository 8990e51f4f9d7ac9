"""Every order of the work gives the bits of a virtual device, where every copy is there at once."""

import functools

import pytest

from tests.accelerator import late
from tests.accelerator.training import GRAINS, Log, expected, late_devices, train
from tests.runtime.small import same_bits

ORDERS = [("late", 0), *(("random", seed) for seed in range(3))]
once = functools.lru_cache(None)(expected)


def check(count, order, **options):
    """Check the bits of a training; the message of a failure holds what another process needs to repeat the run."""
    late.set_order(*order)
    right = once(**{name: value for name, value in options.items() if name != "copies"})
    log = Log()
    found = train(late_devices(count), log=log, **options)
    assert same_bits(found, right), log.difference(found, right)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("grain", GRAINS)
def test_forward_backward(count, grain, order):
    check(count, order, grain=grain)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_forward_and_backward_apart(count, order):
    check(count, order, classic=True)


def test_the_message_of_a_difference():
    late.set_order("random", 0)
    log = Log()
    found = train(late_devices(2), log=log, classic=True, steps=1)
    right = [tensor.clone() for tensor in found]
    found[0][4] += 1
    message = log.difference(found, right)
    assert "Step 0: the gradient of the inputs differs" in message
    assert "rows [4], of the microbatches [1]" in message
    assert "plan: forward [0], forward [1, 2], forward" in message
    assert "late:1: backward, stage 5, layer 8, microbatch 2" in message


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(
    ("count", "options"),
    [
        *((count, {"copies": count, "is_async": is_async}) for count, is_async in [(2, False), (3, True)]),
        *((count, {"keep": 1.0, "is_async": how, "steps": 4}) for count, how in [(1, False), (2, True), (2, "exact")]),
        *((count, {"is_async": True, "steps": 4}) for count in (1, 2)),
        *((count, {"checkpoints": True}) for count in (1, 2)),
        (2, {"pin": "off"}),
    ],
    ids=str,
)
def test_copies_of_the_last_stage_parameters_that_stay_late_steps_checkpoints_and_pageable_memory(
    count, options, order
):
    check(count, order, **options)
