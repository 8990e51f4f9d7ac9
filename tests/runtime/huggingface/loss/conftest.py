"""Losses in chunks for batches of any size."""

import pytest

from roundpipe_runtime.huggingface.loss import lazy_logits


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a few rows are taken for those that are computed in chunks."""
    monkeypatch.setattr(lazy_logits, "_SMALL", 0)
