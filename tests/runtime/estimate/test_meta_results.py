"""Results on meta that are computed once are those that torch computes each time."""

import pytest
import torch

from roundpipe_runtime.estimate.footprint import Footprint, device_kernels

ROWS = torch.empty(6, 4, device="meta")
HALVES = ROWS.bfloat16()
NUMBERS = torch.empty(6, 4, device="meta", dtype=torch.long)
CALLS = {
    "an integer": lambda: NUMBERS + 1,
    "a float that equals it": lambda: NUMBERS + 1.0,
    "an integer, in place": lambda: NUMBERS.clone().add_(1),
    "True": lambda: NUMBERS + True,
    "two dtypes": lambda: ROWS + HALVES,
    "a product": lambda: HALVES @ HALVES.T,
    "its transpose": lambda: HALVES.T @ HALVES,
    "columns first": lambda: ROWS.T.neg(),
    "rows first": lambda: ROWS.neg(),
    "a part": lambda: ROWS[:, 1:3] * 2,
    "dtype by name": lambda: ROWS.sum(0, dtype=torch.float64),
    "dtype by default": lambda: ROWS.sum(0),
    "a list": lambda: torch.cat([ROWS, HALVES]),
    "the list the other way": lambda: torch.cat([HALVES[:1], ROWS]),
    "a copy": lambda: ROWS.to(torch.bfloat16),
    "complex": lambda: torch.view_as_complex(ROWS.view(6, 2, 2)).conj() * 2,
    "not on meta": lambda: torch.ones(2) + 1,
    "a number without a tensor on meta": lambda: torch.arange(3, device="meta"),
}


def form(tensor):
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, tensor.is_conj()


@pytest.mark.parametrize("turns", [CALLS, reversed(CALLS)], ids=["in order", "reversed"])
def test_results_are_those_of_torch(turns):
    """Sizes, strides, dtypes and devices, the first time and again, whatever was asked for before."""
    names = list(turns)
    expected = {name: form(call()) for name, call in CALLS.items()}
    with device_kernels(), torch.inference_mode():
        for name in names * 2:
            assert form(CALLS[name]()) == expected[name], name


def test_results_share_no_memory_unless_those_of_torch_do():
    """A result that is known is another tensor each time, and a view is one of the tensor that is given."""
    with device_kernels():
        first, second = ROWS + 1, ROWS + 1
        view = ROWS.view(4, 6)
        written = first.mul_(2)
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert view.untyped_storage()._cdata == ROWS.untyped_storage()._cdata
    assert written is first


def test_a_result_that_is_known_is_not_computed_again():
    """The second product of the same shapes does no operations, whatever the tensors are."""
    with Footprint() as computed, device_kernels():
        ROWS @ ROWS.T
        torch.empty_like(ROWS) @ ROWS.clone().T
    assert computed.flops == 2 * 6 * 4 * 6


def test_values_outside_of_meta_are_computed():
    """Numbers on the host are not taken for sizes."""
    with device_kernels():
        assert [(torch.tensor([n]) + 1).item() for n in (1, 2, 1)] == [2, 3, 2]


def test_gradients_flow_through_what_is_known():
    """A known result has its place in the graph."""
    weight = torch.empty(4, 4, device="meta", requires_grad=True)
    with device_kernels():
        for _ in range(2):
            (ROWS @ weight).sum().backward()
    assert weight.grad.shape == (4, 4)
