"""The page of runtimes shows what was recorded; inputs in other places of memory have the same values."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from matrix.results import Results
from matrix.runtimes import page_of
from matrix.runtimes_cases import TYPES, strided

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_is_that_of_the_recorded_results():
    """Written by `make runtimes`, and not by hand."""
    (path,) = (DOCS / "data").glob("runtimes-*.json")
    results = Results.read(path)
    assert set(results.types) <= set(TYPES)
    assert (DOCS / "runtimes.md").read_text(encoding="utf-8") == page_of(results, path.name)


def test_moved_inputs_have_the_same_values():
    """Twice: as slices, and transposed; neither is contiguous."""
    given = {"x": torch.arange(12.0).reshape(3, 4)}
    moved = list(strided(given))
    assert [torch.equal(one["x"], given["x"]) for one in moved] == [True, True]
    assert [one["x"].is_contiguous() for one in moved] == [False, False]
