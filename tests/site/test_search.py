"""The index of the search holds the guide, and not the pages that would stand before it."""

import json
from pathlib import Path

import pytest

SITE = Path(__file__).parents[2] / "build" / "docs"

pytestmark = pytest.mark.skipif(not (SITE / "searchindex.js").exists(), reason="the site is not built: make site")


@pytest.fixture(scope="module")
def index():
    text = (SITE / "searchindex.js").read_text(encoding="utf-8")
    return json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))


def pages_with(index, term):
    found = index["terms"].get(term, [])
    return {index["docnames"][number] for number in ([found] if isinstance(found, int) else found)}


@pytest.mark.parametrize("term", ["openvino", "kwarg", "staticcach", "bert", "gb", "fail", "call", "decis"])
def test_words_are_found_in_the_guide_and_not_in_tables_or_inside(index, term):
    """A term is indexed as a stem."""
    found = pages_with(index, term)
    assert not {page for page in found if page.startswith("dev/")}
    assert not found & {"changelog", "matrix", "cut_matrix", "trainings", "runtimes", "genai", "operators"}
    assert term == "decis" or any(page.startswith("guide/") for page in found)
