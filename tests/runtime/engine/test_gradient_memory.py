"""Tests of roundpipe_runtime.engine.parameters.kept: the same pinned memory in every run."""

import pytest
import torch
from torch import nn

from roundpipe_runtime.device import pinning
from roundpipe_runtime.engine.parameters.kept import GradientMemory
from roundpipe_runtime.optim.layer_contents import scan


def own_dtype(parameter):
    return parameter.dtype


@pytest.fixture(autouse=True)
def allocated(monkeypatch):
    """Memory that is not pinned, which takes an accelerator; the bytes of each slab."""
    sizes = []

    def allocate(nbytes):
        sizes.append(nbytes)
        return memoryview(bytearray(nbytes))

    monkeypatch.setattr(pinning, "_allocate", allocate)
    return sizes


@pytest.fixture
def layer():
    return nn.Linear(16, 8)


def test_a_gradient_that_was_cleared_leaves_its_memory_to_the_next(layer, allocated):
    memory, addresses = GradientMemory(), []
    for _ in range(2):
        memory.prepare(scan([layer]), own_dtype)
        layer.weight.grad = memory.take(0, layer.weight, torch.empty(8, 16))
        addresses.append(layer.weight.grad.data_ptr())
        layer.weight.grad = None
    assert addresses[0] == addresses[1]
    assert len(allocated) == 1


def test_a_gradient_that_is_still_there_is_not_overwritten(layer):
    memory = GradientMemory()
    memory.prepare(scan([layer]), own_dtype)
    first = memory.take(0, layer.weight, torch.empty(8, 16)).fill_(1.0)
    one_set = memory.nbytes
    memory.prepare(scan([layer]), own_dtype)
    second = memory.take(0, layer.weight, torch.empty(8, 16)).fill_(2.0)
    assert first.eq(1).all()
    assert memory.nbytes == 2 * one_set
    del second
    memory.prepare(scan([layer]), own_dtype)
    assert memory.nbytes == one_set


def test_layers_that_share_a_parameter_have_a_gradient_each(layer):
    memory = GradientMemory()
    memory.prepare(scan([layer, layer]), own_dtype)
    one, other = (memory.take(number, layer.weight, torch.empty(8, 16)) for number in range(2))
    assert one.data_ptr() != other.data_ptr()


def test_what_has_no_place_gets_new_memory(layer):
    layer.bias.requires_grad_(False)
    memory = GradientMemory()
    memory.prepare(scan([layer]), own_dtype)
    assert memory.take(0, layer.bias, torch.empty(8)) is None
    assert memory.take(0, layer.weight, torch.empty(8, 16).to_sparse()) is None
    assert memory.take(0, layer.weight, torch.empty(8, 16, dtype=torch.float64)) is None


def test_sums_in_another_dtype_have_its_size(layer):
    """bfloat16 parameters whose gradients are summed in float32."""
    layer.bfloat16()
    memory = GradientMemory()
    memory.prepare(scan([layer]), lambda parameter: torch.float32)
    assert memory.take(0, layer.weight, torch.empty(8, 16)).dtype == torch.float32
