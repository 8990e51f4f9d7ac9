"""Losses in chunks for batches of any size."""

import pytest

from roundpipe_runtime.huggingface.loss import lazy_logits


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a few rows are taken for those that are computed in chunks."""
    monkeypatch.setattr(lazy_logits, "_SMALL", 0)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    compute = lazy_logits.LazyLogits.compute
    monkeypatch.setattr(lazy_logits.LazyLogits, "compute", lambda self: found.append(1) or compute(self))
    return found
