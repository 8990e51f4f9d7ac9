"""How large the site is, that its generated tables are up to date, and that old addresses lead to a page."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests import fresh_process

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDE = DOCS / "guide"
# Programs draw and write these, and rows of tables are data.
GENERATED = {"auto_examples", "notebooks", "rows", "tables"}
# The budget: words of all pages, with their programs, and what the sidebar lists.
WORDS, GUIDE_PAGES, LINKS = 80_000, 28, 30


def pages() -> list[Path]:
    return [page for page in sorted(DOCS.rglob("*.md")) if not GENERATED & {*page.relative_to(DOCS).parts}]


def moved():
    spec = importlib.util.spec_from_file_location("moved", DOCS / "moved.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entries(page: Path) -> list[str]:
    found = re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for text in found for line in text.splitlines() if line and not line.startswith(":")]


def test_the_site_has_no_more_words_than_its_budget():
    """Those of the README and the changelog, which pages include, are among them."""
    texts = [*pages(), ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md"]
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in texts}
    assert sum(words.values()) <= WORDS, sorted(words.items(), key=lambda item: -item[1])[:5]


def test_the_guide_and_the_sidebar_are_short():
    assert len(list(GUIDE.glob("*.md"))) <= GUIDE_PAGES
    assert len(entries(DOCS / "index.md")) <= LINKS


def test_every_page_of_the_guide_is_in_the_sidebar_and_in_its_index():
    names = {page.stem for page in GUIDE.glob("*.md")}
    assert {entry.removeprefix("guide/") for entry in entries(DOCS / "index.md") if "guide/" in entry} == names
    assert {*re.findall(r"\]\((\w+)\.md\)", (GUIDE / "index.md").read_text(encoding="utf-8"))} == names - {"index"}


def headings(page: Path) -> set[str]:
    """The anchors of a page, as the site and code hosts make them of its headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", one)).lower().replace(" ", "-") for one in found}


def test_an_old_address_leads_to_a_page_and_a_section():
    for old, new in moved().MOVED.items():
        page, _, section = new.partition("#")
        assert not (DOCS / f"{old}.md").exists()
        text = DOCS / f"{page}.md"
        assert not section or section in headings(text) or page == "license", new


def test_a_redirect_names_the_page_relative_to_the_old_one(tmp_path):
    (tmp_path / "guide").mkdir()
    moved().write_redirects(tmp_path)
    written = (tmp_path / "guide" / "license.html").read_text(encoding="utf-8")
    assert 'content="0; url=../license.html"' in written
    assert 'url=lora.html"' in (tmp_path / "guide" / "runtime_lora.html").read_text(encoding="utf-8")


LINKED = {
    DOCS / name for name in re.findall(r"\]\(docs/([\w/]+\.md)", (ROOT / "README.md").read_text(encoding="utf-8"))
}


@pytest.mark.parametrize(
    "page", sorted({*LINKED, *GUIDE.glob("*.md")} - {DOCS / "index.md"}), ids=lambda page: page.stem
)
def test_a_page_of_the_guide_or_the_readme_reads_well_on_a_code_host(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\{(?:doc|ref|func|class|meth)\}`", text) == []
    assert re.findall(r"^\([\w-]+\)=$", text, re.MULTILINE) == []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, section = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        assert not section or section in headings(path), target


# The sections of the glossary, and the words of each that mean something else elsewhere.
OWN_WORDS = {
    "trees": re.compile(r"\b(?:leaf|static parts?|(?:the|a|inside) blocks?)\b", re.IGNORECASE),
    "exports": re.compile(r"\b(?:proofs?|(?:the|a|all|each|one|other|further|these|of|own) cases?)\b", re.IGNORECASE),
    "pipelines": re.compile(r"\b(?:stages?|microbatch(?:es)?|pieces?|phases?|(?:is|are|be|how) cut)\b", re.IGNORECASE),
}
# Recorded tables, and the page that lists all pages.
WITHOUT_WORDS = {DOCS / "index.md", GUIDE / "index.md", GUIDE / "words.md"}


@pytest.mark.parametrize("section", OWN_WORDS)
def test_a_page_links_to_the_glossary_where_it_first_uses_one_of_our_own_words(section):
    late = []
    for page in sorted({*LINKED, *GUIDE.glob("*.md")} - WITHOUT_WORDS):
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        before, link, _ = text.partition(f"words.md#{section}")
        before = before.rpartition("\n\n")[0] if link else before
        prose = re.sub(r"`[^`]*`|\]\([^)]*\)|^#.*$", "", before, flags=re.MULTILINE)
        if found := OWN_WORDS[section].search(prose):
            late.append(
                f"{page.relative_to(DOCS)}: {' '.join(prose[max(0, found.start() - 40) : found.end() + 40].split())}"
            )
    assert late == []


@pytest.mark.parametrize(
    "word", ["proof", "case", "block", "leaf", "row", "cut", "piece", "stage", "phase", "microbatch", "static"]
)
def test_our_own_words_are_in_the_glossary(word):
    glossary = (GUIDE / "words.md").read_text(encoding="utf-8")
    assert re.search(rf"\*+[^*\n]*\b{word}(?:es)?\b[^*\n]*\*", glossary.replace("leaves", "leaf"))


@pytest.mark.slow
def test_the_committed_tables_are_up_to_date(tmp_path):
    """`make tables` writes them. Of pictures only the names are compared: their letters differ between systems."""
    pytest.importorskip("matplotlib")
    program = "import pathlib, sys; sys.path.insert(0, 'docs'); import generated_tables as tables; "
    fresh_process.run("-c", f"{program}tables.write_tables(pathlib.Path({str(tmp_path)!r}))", cwd=ROOT)
    for path in sorted(tmp_path.iterdir()):
        committed = DOCS / "tables" / path.name
        assert committed.exists(), f"make tables: {path.name}"
        if path.suffix == ".md":
            assert committed.read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), (
                f"make tables: {path.name}"
            )
    assert {path.name for path in (DOCS / "tables").iterdir()} == {path.name for path in tmp_path.iterdir()}
