"""The page of onnxruntime-genai shows what was recorded."""

from pathlib import Path

from matrix.genai import page_of
from matrix.genai_cases import COLUMNS, TYPES
from matrix.results import Results

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_is_that_of_the_recorded_results():
    (path,) = (DOCS / "data").glob("genai-*.json")
    assert (DOCS / "genai.md").read_text(encoding="utf-8") == page_of(Results.read(path), path.name)


def test_every_type_of_the_list_is_recorded_and_opens_with_a_shared_cache():
    """None failed; without the option a folder may have no file for the library."""
    (path,) = (DOCS / "data").glob("genai-*.json")
    types = Results.read(path).types
    assert sorted(types) == sorted(TYPES)
    for name, entry in types.items():
        assert [entry["columns"][column]["ok"] for column in COLUMNS if column != "opened"] == [True] * 3, name
        assert entry["columns"]["opened"]["ok"] is not False
