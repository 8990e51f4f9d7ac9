"""Every order of the work gives the bits of a virtual device, where every copy is there at once."""

import functools

import pytest

from tests.accelerator import late
from tests.accelerator.training import GRAINS, Log, expected, late_devices, train
from tests.runtime.small import same_bits

ORDERS = [("late", 0), *(("random", seed) for seed in range(3))]
once = functools.lru_cache(None)(expected)


def check(count, order, **options):
    late.set_order(*order)
    check_bits(count, once(**options), **options)


def check_bits(count, right, **options):
    """Check the bits of a training; the message of a failure holds what another process needs to repeat the run."""
    log = Log()
    found = train(late_devices(count), log=log, **options)
    assert same_bits(found, right), log.difference(found, right)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("grain", GRAINS)
def test_forward_backward(count, grain, order):
    check(count, order, grain=grain)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("count", "is_async"), [(2, False), (3, True)])
def test_copies_of_the_last_stage(count, is_async, order):
    late.set_order(*order)
    check_bits(count, once(is_async=is_async), copies=count, is_async=is_async)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("count", "is_async"), [(1, False), (2, True), (2, "exact")])
def test_parameters_that_stay(count, is_async, order):
    check(count, order, keep=1.0, is_async=is_async, steps=4)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_forward_and_backward_apart(count, order):
    check(count, order, classic=True)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_in_the_background(count, order):
    check(count, order, is_async=True, steps=4)


@pytest.mark.parametrize("order", ORDERS[:2], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_parameters_in_pageable_memory(count, order):
    check(count, order, pin="off")


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_a_checkpoint_inside_a_layer(count, order):
    check(count, order, checkpoints=True)


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
