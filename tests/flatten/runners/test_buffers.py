"""Caches that a runtime writes in place: what the caller passed is never written to."""

import pytest
import torch

from yobx_flatten.runners.in_place import TensorBuffers


@pytest.mark.parametrize("rows", [[1, 0], [1, 1, 0]], ids=["as many rows", "more rows"])
def test_rows_are_selected_without_a_write_to_the_caller(rows):
    """Before the first step the tensors are the caller's, those of every layer."""
    given = {name: torch.randn(2, 3, 4, 5) for name in ("key", "value")}
    before = {name: tensor.clone() for name, tensor in given.items()}
    buffers = TensorBuffers(dict(given), {"key": "present_key", "value": "present_value"})
    buffers.select_rows(torch.tensor(rows))
    found = buffers.tensors()
    buffers.reserve(1)
    for name, tensor in before.items():
        assert torch.equal(found[name], tensor[rows])
        assert torch.equal(buffers.tensors()[name], tensor[rows])
        buffers[name].zero_()
        assert torch.equal(given[name], tensor)
