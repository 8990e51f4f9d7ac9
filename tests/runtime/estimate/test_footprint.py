"""What code allocates and computes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from roundpipe_runtime.estimate.footprint import Footprint, storage_bytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_counts_until_the_last_tensor_is_gone(device):
    """A storage counts once, whatever views it has, and no longer than they are there."""
    with Footprint() as found:
        big = torch.empty(1000, device=device)
        view = big[:10]
        del big
        assert found.alive == 4000
        del view
        small = torch.empty(10, device=device)
    assert (found.alive, found.peak) == (40, 4000)
    del small
    assert found.alive == 0


def test_what_was_there_before_does_not_count():
    """Inputs and parameters are told apart from what is computed from them."""
    before = torch.ones(100)
    with Footprint() as found:
        found.ignore([before])
        view = before.view(10, 10)
        other = view + 1
    assert found.alive == storage_bytes([other]) == 400


def test_what_was_made_elsewhere_can_be_counted():
    """A copy that the device made counts as what it computed."""
    found = Footprint()
    copy = torch.ones(100)
    found.count(copy)
    assert found.alive == 400
    del copy
    assert found.alive == 0


def test_a_new_peak_begins_at_what_is_alive():
    """The highest point of a second part is its own."""
    with Footprint() as found:
        kept = torch.empty(25)
        torch.empty(1000)
        assert found.restart() == 100
        torch.empty(50)
    assert found.peak == 300
    del kept


def test_the_backward_counts_too():
    """Operations of autograd are operations: of a product, two more in the backward."""
    a, b = torch.ones(3, 4, requires_grad=True), torch.ones(4, 5, requires_grad=True)
    with Footprint() as found:
        product = a @ b
        assert found.flops == 2 * 3 * 4 * 5
        product.sum().backward()
    assert found.flops == 3 * 2 * 3 * 4 * 5


def test_operations_are_those_of_torchs_counter():
    """A convolution and a transformer layer have the count of torch's own flop counter."""
    model = torch.nn.Sequential(torch.nn.Conv1d(4, 8, 3), torch.nn.Conv1d(8, 4, 3))
    x = torch.ones(2, 4, 16, requires_grad=True)
    with FlopCounterMode(display=False) as expected:
        model(x).sum().backward()
    with Footprint() as found:
        model(x).sum().backward()
    assert found.flops == expected.get_total_flops()


@pytest.mark.parametrize("shared", [1, 2])
def test_heads_that_share_keys_count_as_if_each_had_its_own(shared):
    """Scores and weighted values: 4 x heads x length^2 x width, however many keys there are."""
    q, k = torch.ones(1, 4, 32, 16), torch.ones(1, 4 // shared, 32, 16)
    with Footprint() as found:
        torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=shared > 1)
    assert found.flops == 4 * 4 * 32 * 32 * 16


def test_experts_count_one_matrix_for_each_row():
    """Rows that are multiplied in groups: 2 x rows x width x width, with 3 experts as with one."""
    rows, experts = torch.ones(8, 16, requires_grad=True), torch.ones(3, 16, 32, requires_grad=True)
    ends = torch.tensor([2, 5, 8], dtype=torch.int32)
    with Footprint() as found:
        out = torch.nn.functional.grouped_mm(rows, experts, offs=ends)
        assert found.flops == 2 * 8 * 16 * 32
        out.square().sum().backward()
    assert found.flops == 3 * 2 * 8 * 16 * 32
