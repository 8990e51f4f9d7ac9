"""The search finds the guide first: its index has neither tables nor pages about the inside."""

import json
import re
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
    assert not {page for page in found if page.startswith("rows/")}
    assert not found & {"changelog", "matrix", "cut_matrix", "trainings", "runtimes", "genai", "operators"}
    assert term == "decis" or any(page.startswith("guide/") for page in found)


def ranked(index, query):
    """The pages that a query finds, as the script of Sphinx ranks them: all words, titles before texts."""
    from sphinx.search.en import SearchEnglish

    language = SearchEnglish({})
    # the script leaves out numbers
    words = [language.stem(word.lower()) for word in re.findall(r"\w+", query) if not word.isdigit()]
    scores = {}
    for page in set.intersection(*(pages_with(index, word) | titled(index, word) for word in words)):
        scores[page] = sum(15 if page in titled(index, word) else 5 for word in words)
    for title, places in index["alltitles"].items():
        if query.lower() in title.lower() and 2 * len(query) >= len(title):
            for number, section in places:
                page = index["docnames"][number]
                scores[page] = max(
                    scores.get(page, 0), round(15 * len(query) / len(title)) + (1 if section is None else 0)
                )
    return sorted(scores, key=lambda page: -scores[page])


def titled(index, term):
    found = index["titleterms"].get(term, [])
    return {index["docnames"][number] for number in ([found] if isinstance(found, int) else found)}


@pytest.mark.parametrize("query", ["openvino", "kwargs", "StaticCache", "BERT", "24 GB", "failing call"])
def test_the_guide_is_found_first(index, query):
    """Pages of the guide have the highest score; objects of the reference are listed by name, apart."""
    found = ranked(index, query)
    best = [page for page in found if page.startswith("guide/")]
    assert best
    assert found[0].startswith("guide/"), found[:5]
