"""The reference lists every public name; how large the site is, what a page states, and that tables are up to date."""

import importlib
import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

import roundpipe_runtime
import yobx_flatten
from roundpipe_runtime import huggingface
from tests import fresh_process, old_names

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDE = DOCS / "guide"
# Programs draw and write these, and rows of tables are data.
GENERATED = {"auto_examples", "notebooks", "rows", "tables"}
# The budget: words of all pages, with their programs, and what the sidebar lists.
WORDS, GUIDE_PAGES, LINKS = 80_000, 28, 30


def pages() -> list[Path]:
    return [page for page in sorted(DOCS.rglob("*.md")) if not GENERATED & {*page.relative_to(DOCS).parts}]


def entries(page: Path) -> list[str]:
    found = re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for text in found for line in text.splitlines() if line and not line.startswith(":")]


def test_the_words_of_the_site_are_within_its_budget_and_our_own_are_in_the_glossary():
    """Those of the README and the changelog, which pages include, are among them."""
    texts = [*pages(), ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md"]
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in texts}
    assert sum(words.values()) <= WORDS, sorted(words.items(), key=lambda item: -item[1])[:5]
    glossary = (GUIDE / "words.md").read_text(encoding="utf-8").replace("leaves", "leaf")
    for word in ("proof", "case", "block", "leaf", "row", "cut", "piece", "stage", "phase", "microbatch", "static"):
        assert re.search(rf"\*+[^*\n]*\b{word}(?:es)?\b[^*\n]*\*", glossary), word


def test_every_page_of_the_guide_is_in_the_sidebar_and_in_its_index_and_both_are_short():
    """Sections of the page about torch and JAX each have a program that prints."""
    names, sidebar = {page.stem for page in GUIDE.glob("*.md")}, entries(DOCS / "index.md")
    assert {entry.removeprefix("guide/") for entry in sidebar if "guide/" in entry} == names
    assert {*re.findall(r"\]\((\w+)\.md\)", (GUIDE / "index.md").read_text(encoding="utf-8"))} == names - {"index"}
    assert len(names) <= GUIDE_PAGES
    assert len(sidebar) <= LINKS
    sections = re.split(r"^## ", (GUIDE / "torch_and_jax.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    without = [text.splitlines()[0] for text in sections if "```python" not in text or "```text" not in text]
    assert not without


def headings(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", one)).lower().replace(" ", "-") for one in found}


def test_an_old_address_leads_to_a_page_and_a_section(tmp_path):
    """A redirect names the page relative to the old one."""
    spec = importlib.util.spec_from_file_location("moved", DOCS / "moved.py")
    moved = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(moved)
    for old, new in moved.MOVED.items():
        page, _, section = new.partition("#")
        assert not (DOCS / f"{old}.md").exists()
        text = DOCS / f"{page}.md"
        assert not section or section in headings(text) or page == "license", new
    (tmp_path / "guide").mkdir()
    moved.write_redirects(tmp_path)
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


@pytest.mark.parametrize("section", OWN_WORDS)
def test_a_page_links_to_the_glossary_where_it_first_uses_one_of_our_own_words(section):
    late = []
    for page in sorted({*LINKED, *GUIDE.glob("*.md")} - {DOCS / "index.md", GUIDE / "index.md", GUIDE / "words.md"}):
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        before, link, _ = text.partition(f"words.md#{section}")
        before = before.rpartition("\n\n")[0] if link else before
        prose = re.sub(r"`[^`]*`|\]\([^)]*\)|^#.*$", "", before, flags=re.MULTILINE)
        if found := OWN_WORDS[section].search(prose):
            near = prose[max(0, found.start() - 40) : found.end() + 40]
            late.append(f"{page.relative_to(DOCS)}: {' '.join(near.split())}")
    assert late == []


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
            assert committed.read_text("utf-8") == path.read_text("utf-8"), f"make tables: {path.name}"
    assert {path.name for path in (DOCS / "tables").iterdir()} == {path.name for path in tmp_path.iterdir()}


API = DOCS / "api"
DIRECTIVE = re.compile(r"^\.\. (?:autofunction|autoclass|autoexception|py:data):: ([\w.]+)$", re.MULTILINE)
FOLDERS = [importlib.import_module(f"yobx_flatten.{home}") for home in yobx_flatten._HOMES]
# `__version__` is a sentence on the first page, and a name of the package is not listed again with its folder.
PUBLIC = {f"yobx_flatten.{name}" for name in yobx_flatten.__all__ if name != "__version__"} | {
    f"{folder.__name__}.{name}" for folder in FOLDERS for name in folder.__all__ if name not in yobx_flatten.__all__
}


def documented() -> Counter[str]:
    names: Counter[str] = Counter()
    for page in API.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if ".. currentmodule:: yobx_flatten" in text:
            full = (name if "." in name else f"yobx_flatten.{name}" for name in DIRECTIVE.findall(text))
            names.update(name for name in full if not name.startswith("yobx_flatten.testing."))
    return names


def test_the_references_list_every_public_name_once_and_names_that_moved_stay():
    """A name of two folders would have two homes."""
    assert len(yobx_flatten.__all__) <= 58
    assert max(Counter(name for folder in FOLDERS for name in folder.__all__).values()) == 1
    assert set(documented()) == PUBLIC
    assert max(documented().values()) == 1
    contents = (API / "index.md").read_text(encoding="utf-8").split()
    assert {page.stem for page in API.glob("*.md")} - {"index"} <= set(contents)  # Sphinx would warn minutes later
    homes = {name: folder for folder in FOLDERS for name in folder.__all__}
    for found in old_names.OLD:
        assert found is getattr(homes[found.__name__], found.__name__)
        assert found.__name__ in dir(yobx_flatten)
    with pytest.raises(AttributeError, match="module 'yobx_flatten' has no attribute 'Undoo'"):
        yobx_flatten.Undoo  # noqa: B018 # the lookup is the test
    text = "\n".join(page.read_text(encoding="utf-8") for page in API.glob("runtime_*.md"))
    listed = Counter(re.findall(r"^\.\. auto\w+:: roundpipe_runtime\.(\S+)$", text, re.MULTILINE))
    more = [f"huggingface.{name}" for name in huggingface.__all__ if name not in roundpipe_runtime.__all__]
    public = {*roundpipe_runtime.__all__, *roundpipe_runtime._TRAINERS, *more} - {"optim"}
    assert public - set(listed) == set()
    assert [name for name, count in listed.items() if count > 1] == []
    text = (GUIDE / "errors.md").read_text(encoding="utf-8")
    said = {name for name in roundpipe_runtime.__all__ if name.endswith(("Error", "Warning"))}
    assert {name for name in said - {"RoundPipeWarning"} if f"`{name}`" not in text} == set()


POINT = "import collections, torch.utils._pytree as pytree\nPoint = collections.namedtuple('Point', 'x y')"
# What libraries do, in a process of their own: what is needed, a program and what it prints.
DIFFERENCES = {
    "torch hands unflatten a list, and JAX a tuple": (["jax"], """
import jax, torch.utils._pytree as pytree
class Node: pass
kinds = []
pytree.register_pytree_node(Node, lambda n: ([1], None), lambda c, s: kinds.append(type(c)))
jax.tree_util.register_pytree_node(Node, lambda n: ([1], None), lambda s, c: kinds.append(type(c)))
pytree.tree_map(lambda x: x, Node()); jax.tree.map(lambda x: x, Node())
print(*(kind.__name__ for kind in kinds))
""", "list tuple\n"),
    "optree and JAX pickle their specs": (["jax", "optree"], """
import jax, optree, pickle, torch.utils._pytree as pytree
for structure in (jax.tree.structure, optree.tree_structure):
    print(pickle.loads(pickle.dumps(structure([1, {'a': 2}]))) == structure([1, {'a': 2}]))
print(pytree.treespec_dumps(pytree.tree_structure([1]))[:4])
""", "True\nTrue\n[1, \n"),
    "torch flattens named tuples before it looks at what is registered": ([], POINT + """
pytree.register_pytree_node(Point, lambda p: ([p.x], p.y), lambda c, y: Point(*c, y))
print(pytree.tree_leaves(Point(1, 2)))
""", "[1, 2]\n"),
    "a named tuple is saved under the name that torch is given": ([], POINT + """
spec = pytree.tree_structure(Point(1, 2))
try:
    pytree.treespec_dumps(spec)
except NotImplementedError:
    print('no name')
pytree._register_namedtuple(Point, serialized_type_name='a.Point')
print(pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec)
""", "no name\nTrue\n"),
}  # fmt: skip


@pytest.mark.parametrize("claim", DIFFERENCES)
def test_libraries_differ_as_the_page_states(claim):
    needed, code, printed = DIFFERENCES[claim]
    for library in needed:
        pytest.importorskip(library, reason="one of the two")
    assert fresh_process.run("-c", code).stdout == printed
