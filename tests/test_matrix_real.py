"""The page of the model with trained weights shows what was recorded, and its measures are those of their formulas."""

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from matrix.cases import DifferenceError
from matrix.real import page_of
from matrix.real_cases import FORMS, RealTrial, divergence, perplexity
from matrix.results import Results

DOCS = Path(__file__).parent.parent / "docs"
RECORDED = sorted((DOCS / "data").glob("real-*.json"))


def test_the_page_is_that_of_the_recorded_results():
    """Written by `make real`, and not by hand."""
    (path,) = RECORDED
    assert (DOCS / "real.md").read_text(encoding="utf-8") == page_of(Results.read(path), path.name)


def test_every_form_is_recorded_and_the_forms_of_this_package_pass():
    """A peer's form may be further from the model; ours may not."""
    (path,) = RECORDED
    types = Results.read(path).types
    assert sorted(types) == sorted(FORMS)
    failed = {
        f"{name}, {column}: {result['why']}"
        for name, entry in types.items()
        for column, result in entry["columns"].items()
        if result["ok"] is not True and FORMS[name].genai is None
    }
    assert not failed


def test_perplexity_and_divergence_are_those_of_known_distributions():
    """A uniform guess among 8 has a perplexity of 8; the divergence of two coins is an analytic sum."""
    tokens = torch.tensor([3, 1, 4, 1, 5])
    assert perplexity(torch.zeros(5, 8), tokens) == pytest.approx(8)
    fair, bent = torch.tensor([[0.0, 0.0]]), torch.log(torch.tensor([[0.9, 0.1]]))
    wanted = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert divergence(fair, bent) == pytest.approx(wanted, rel=1e-6)


def test_a_form_whose_tokens_are_too_far_from_the_model_fails(tmp_path):
    """At the bound it passes, below it does not."""
    trial = RealTrial("other weights int4 fused", tmp_path)
    assert trial.near({"tokens": 0.95, "compared": 100})["tokens"] == 0.95
    with pytest.raises(DifferenceError, match=r"94\.0% of 100 tokens are the model's; at least 95%"):
        trial.near({"tokens": 0.94, "compared": 100})
