"""The install page shows which versions were tried, from what was recorded."""

import importlib.util
from pathlib import Path

import pytest
from packaging.requirements import Requirement

DOCS = Path(__file__).parent.parent / "docs"
SPEC = importlib.util.spec_from_file_location("tried_table", DOCS / "tried_table.py")
tried_table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tried_table)

RECORDED = {
    "date": "2026-11-25",
    "ok": False,
    "versions": {"python": "3.11.7", "torch": "2.15.0+cu130", "transformers": "5.25.0"},
    "steps": [
        {"name": "the programs of the README", "result": "ok", "reason": "", "seconds": 2.0},
        {"name": "roundpipe demo", "result": "failed", "reason": "A | B\n`c`", "seconds": 2.0},
        {"name": "further cases", "result": "not there", "reason": "no folder", "seconds": 0.0},
    ],
    "unknown": {"model types": ["dory"], "caches": []},
}


@pytest.mark.parametrize(
    ("line", "words"),
    [("torch>=2.11", "2.11 and newer"), ("transformers>=4.56,<6", "4.56 and newer, below 6"), ("torch", "")],
)
def test_bounds_are_shown_in_words(line, words):
    assert tried_table.in_words(Requirement(line)) == words


def test_the_newest_versions_and_their_results_are_shown():
    shown = list(tried_table.lines(RECORDED))
    held = tried_table.development()
    assert f"| torch |  | {held['torch']} | 2.15.0 | 2.11 and newer |" in shown
    before = ", ".join(tried_table.older())
    assert f"| transformers | {before} | {held['transformers']} | 5.25.0 | 4.56 and newer, below 6 |" in shown
    assert before.startswith("4.56.2, ")
    assert "`make newest` ran with the newest versions on 2026-11-25, and not all steps passed:" in shown
    assert "| the programs of the README | ok |" in shown
    assert r"| roundpipe demo | failed: `A \| B 'c'` |" in shown
    assert "| further cases | not there |" in shown
    assert shown[-1] == "- model types: `dory`"
    assert "all steps passed:" in "\n".join(tried_table.lines({**RECORDED, "ok": True}))


def test_without_a_record_the_page_states_so():
    assert list(tried_table.lines(None))[-1] == "The newest versions are not recorded yet: `make newest` records them."


def test_the_page_is_written_where_the_install_page_includes_it(tmp_path):
    tried_table.write_tried(tmp_path)
    assert (tmp_path / "tried.md").read_text(encoding="utf-8").startswith("| | older | development and CI | newest |")
    assert "{include} ../tables/tried.md" in (DOCS / "guide" / "install.md").read_text(encoding="utf-8")
