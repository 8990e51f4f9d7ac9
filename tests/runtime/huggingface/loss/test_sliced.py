"""The loss over slices of a vocabulary is torch's loss of all logits."""

import itertools

import pytest
import torch
from torch.nn import functional

from roundpipe_runtime import VirtualDevice
from roundpipe_runtime.engine.parameters.host_table import HostSum, HostTable, TableAccess
from roundpipe_runtime.huggingface.loss import sliced
from roundpipe_runtime.huggingface.loss.lazy_logits import LazyLogits
from roundpipe_runtime.huggingface.loss.sliced import chunked_cross_entropy
from roundpipe_runtime.optim.layer_contents import Table

VOCABULARY, WIDTH = 23, 6


@pytest.fixture
def device():
    made = VirtualDevice(check=True)
    yield made
    made.close()


def table_of(weight, device, rows, *, trained=True):
    access = TableAccess(
        device, weight, Table(rows, is_head=True), requires_grad=trained,
        new_sum=lambda: HostSum(torch.empty_like(weight, device="meta")),
    )  # fmt: skip
    return HostTable(access, requires_grad=trained)


def soft_cap(values):
    return torch.tanh(values / 3.0) * 3.0


def case(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(rows, WIDTH, generator=generator, dtype=dtype) for rows in (11, VOCABULARY))
    bias = torch.randn(VOCABULARY, generator=generator, dtype=dtype)
    labels = torch.randint(0, VOCABULARY, (11,), generator=generator)
    labels[[0, 4, 10]] = -100
    return hidden, weight, bias, labels


@pytest.mark.parametrize(
    ("rows", "chunk", "smoothing", "transform", "reduction"),
    [
        *itertools.product((1, 5, 23, 64), (2**26, 7), (0.0, 0.2), (None, soft_cap), ("mean",)),
        (5, 7, 0.2, soft_cap, "sum"),
    ],
)
def test_loss_and_gradients_are_those_of_torch(rows, chunk, smoothing, transform, reduction, device, monkeypatch):
    monkeypatch.setattr(sliced, "_MOST", chunk)
    hidden, weight, bias, labels = case()
    given = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    logits = functional.linear(*given)
    logits = logits if transform is None else transform(logits)
    expected = functional.cross_entropy(logits, labels, reduction=reduction, label_smoothing=smoothing)
    (3 * expected).backward()
    hidden.requires_grad_()
    bias.requires_grad_()
    table = table_of(weight, device, rows)
    loss = chunked_cross_entropy(
        hidden, table, labels, bias=bias, transform=transform, reduction=reduction, label_smoothing=smoothing
    )
    torch.testing.assert_close(loss, expected)
    (3 * loss).backward()
    of_table = table.access.pop_sum()
    of_table.result()
    for found, other in zip((hidden.grad, of_table.total, bias.grad), given, strict=True):
        torch.testing.assert_close(found, other.grad)


def test_labels_that_are_all_ignored_give_no_gradient(device):
    """A mean over nothing is NaN, as torch's is, and its gradients are zeros."""
    hidden, weight, _, labels = case()
    hidden.requires_grad_()
    table = table_of(weight, device, 5)
    loss = chunked_cross_entropy(hidden, table, torch.full_like(labels, -100))
    assert loss.isnan()
    loss.backward()
    assert not hidden.grad.any()
    assert not table.access.pop_sum().total.any()


def test_a_frozen_head_has_no_sum(device):
    hidden, weight, bias, labels = case()
    expected = hidden.clone().requires_grad_()
    functional.cross_entropy(functional.linear(expected, weight, bias), labels).backward()
    hidden.requires_grad_()
    table = table_of(weight, device, 5, trained=False)
    chunked_cross_entropy(hidden, table, labels, bias=bias).backward()
    torch.testing.assert_close(hidden.grad, expected.grad)
    assert table.access.pop_sum() is None


def test_one_slice_is_on_the_device_at_a_time(device):
    device.memory_limit = 10**9
    hidden, weight, _, labels = case()
    hidden.requires_grad_()
    chunked_cross_entropy(hidden, table_of(weight, device, 4), labels).backward()
    assert device.peak <= 2 * weight[:4].nbytes


def test_lazy_logits_of_a_table_have_its_form(device):
    hidden, weight, bias, _ = case()
    lazy = LazyLogits(hidden, (table_of(weight, device, 5), bias))
    assert lazy.shape == (11, VOCABULARY)
    torch.testing.assert_close(lazy + 0.0, functional.linear(hidden, weight, bias))
