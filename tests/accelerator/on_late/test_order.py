"""Every order of the work gives the bits of a virtual device, where every copy is there at once."""

import functools

import pytest

from tests.accelerator import late
from tests.accelerator.training import GRAINS, expected, late_devices, train
from tests.runtime.small import same_bits

ORDERS = [("late", 0), *(("random", seed) for seed in range(3))]
once = functools.lru_cache(None)(expected)


def check(count, order, **options):
    late.set_order(*order)
    assert same_bits(train(late_devices(count), **options), once(**options))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("grain", GRAINS)
def test_forward_backward(count, grain, order):
    check(count, order, grain=grain)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("count", "is_async"), [(2, False), (3, True)])
def test_copies_of_the_last_stage(count, is_async, order):
    """Gradients of one microbatch cross from device to device over the host, and are added in order."""
    late.set_order(*order)
    assert same_bits(train(late_devices(count), copies=count, is_async=is_async), once(is_async=is_async))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("count", "is_async"), [(1, False), (2, True), (2, "exact")])
def test_parameters_that_stay(count, is_async, order):
    """A weight that two layers have is uploaded once, and computed with in later runs; others change in between."""
    check(count, order, keep=1.0, is_async=is_async, steps=4)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_forward_and_backward_apart(count, order):
    """Outputs, gradients of the inputs, and the gradients of the weights."""
    check(count, order, classic=True)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_in_the_background(count, order):
    """The weights are one step old, and none is read while it is written."""
    check(count, order, is_async=True, steps=4)


@pytest.mark.parametrize("order", ORDERS[:2], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_parameters_in_pageable_memory(count, order):
    check(count, order, pin="off")


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_a_checkpoint_inside_a_layer(count, order):
    check(count, order, checkpoints=True)
