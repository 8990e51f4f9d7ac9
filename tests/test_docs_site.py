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


API = Path(__file__).parent.parent / "docs" / "api"
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


def test_the_package_has_few_names():
    assert len(yobx_flatten.__all__) <= 58


def test_a_folder_lists_only_names_of_its_own():
    """A name of two folders would have two homes."""
    names = Counter(name for folder in FOLDERS for name in folder.__all__)
    assert [name for name, count in names.items() if count > 1] == []


def test_names_that_moved_are_still_names_of_the_package():
    homes = {name: folder for folder in FOLDERS for name in folder.__all__}
    for name in old_names.__all__:
        assert getattr(old_names, name) is getattr(homes[name], name)
    assert set(old_names.__all__) <= set(dir(yobx_flatten))


def test_a_name_that_never_was_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'yobx_flatten' has no attribute 'Undoo'"):
        yobx_flatten.Undoo  # noqa: B018 # the lookup is the test


def test_every_public_name_is_in_the_reference():
    assert not PUBLIC - set(documented())


def test_the_reference_lists_no_other_name():
    assert not set(documented()) - PUBLIC


def test_no_name_is_listed_twice():
    assert [name for name, count in documented().items() if count > 1] == []


def test_the_reference_of_the_runtime_lists_every_public_name_once():
    text = "\n".join(page.read_text(encoding="utf-8") for page in API.glob("runtime_*.md"))
    listed = Counter(re.findall(r"^\.\. auto\w+:: roundpipe_runtime\.(\S+)$", text, re.MULTILINE))
    more = [f"huggingface.{name}" for name in huggingface.__all__ if name not in roundpipe_runtime.__all__]
    public = {*roundpipe_runtime.__all__, *roundpipe_runtime._TRAINERS, *more} - {"optim"}
    assert public - set(listed) == set()
    assert [name for name, count in listed.items() if count > 1] == []


def test_the_guide_lists_every_error_and_warning_of_the_runtime():
    text = (API.parent / "guide" / "errors.md").read_text(encoding="utf-8")
    assert [name for name in roundpipe_runtime.__all__ if name.endswith("Error") and f"`{name}`" not in text] == []
    warnings = [name for name in roundpipe_runtime.__all__ if name.endswith("Warning") and name != "RoundPipeWarning"]
    assert [name for name in warnings if f"`{name}`" not in text] == []


def test_every_page_is_in_the_table_of_contents():
    """Sphinx would warn, and say it minutes later."""
    contents = (API / "index.md").read_text(encoding="utf-8").split()
    assert {page.stem for page in API.glob("*.md")} - {"index"} <= set(contents)


DIFFERENCES = Path(__file__).parent.parent / "docs" / "guide"


def fresh(code):
    return fresh_process.run("-c", code).stdout


def test_every_section_has_a_program_that_prints():
    sections = re.split(r"^## ", (DIFFERENCES / "torch_and_jax.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    without = [text.splitlines()[0] for text in sections if "```python" not in text or "```text" not in text]
    assert not without


def test_torch_hands_unflatten_a_list_and_jax_a_tuple():
    pytest.importorskip("jax", reason="one of the two")
    assert (
        fresh(
            "import jax, torch.utils._pytree as pytree\n"
            "class Node: pass\n"
            "kinds = []\n"
            "pytree.register_pytree_node(Node, lambda n: ([1], None), lambda c, s: kinds.append(type(c)))\n"
            "jax.tree_util.register_pytree_node(Node, lambda n: ([1], None), lambda s, c: kinds.append(type(c)))\n"
            "pytree.tree_map(lambda x: x, Node()); jax.tree.map(lambda x: x, Node())\n"
            "print(*(kind.__name__ for kind in kinds))\n"
        )
        == "list tuple\n"
    )


def test_optree_and_jax_pickle_their_specs():
    pytest.importorskip("jax", reason="one of the two")
    pytest.importorskip("optree", reason="the other one")
    assert (
        fresh(
            "import jax, optree, pickle, torch.utils._pytree as pytree\n"
            "for structure in (jax.tree.structure, optree.tree_structure):\n"
            "    print(pickle.loads(pickle.dumps(structure([1, {'a': 2}]))) == structure([1, {'a': 2}]))\n"
            "print(pytree.treespec_dumps(pytree.tree_structure([1]))[:4])\n"
        )
        == "True\nTrue\n[1, \n"
    )


def test_torch_does_not_look_at_what_is_registered_for_a_named_tuple():
    """Its own way of taking named tuples apart comes first."""
    assert (
        fresh(
            "import collections, torch.utils._pytree as pytree\n"
            "Point = collections.namedtuple('Point', 'x y')\n"
            "pytree.register_pytree_node(Point, lambda p: ([p.x], p.y), lambda c, y: Point(*c, y))\n"
            "print(pytree.tree_leaves(Point(1, 2)))\n"
        )
        == "[1, 2]\n"
    )


def test_a_named_tuple_is_saved_under_the_name_that_torch_is_given():
    assert (
        fresh(
            "import collections, torch.utils._pytree as pytree\n"
            "Point = collections.namedtuple('Point', 'x y')\n"
            "spec = pytree.tree_structure(Point(1, 2))\n"
            "try:\n    pytree.treespec_dumps(spec)\n"
            "except NotImplementedError:\n    print('no name')\n"
            "pytree._register_namedtuple(Point, serialized_type_name='a.Point')\n"
            "print(pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec)\n"
        )
        == "no name\nTrue\n"
    )
