"""Tests of the runtime that are about virtual devices themselves, and what the reference accelerator cannot compute."""

import pytest

__all__ = ["reason_to_skip"]

# Part of a test's name, and why it is not run.
_REASONS = {
    "test_a_sparse_gradient_comes_down": "the reference accelerator has no sparse tensors",
}


def reason_to_skip(item: pytest.Item) -> str | None:
    return next((reason for part, reason in _REASONS.items() if part in item.nodeid), None)
