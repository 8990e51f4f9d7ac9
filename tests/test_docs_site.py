"""The reference lists every public name; how large the site is, what a page states, and what its tables show."""

import importlib
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from transformers import cache_utils

import roundpipe_runtime
import yobx_flatten
from roundpipe_runtime import huggingface
from tests import fresh_process, old_names
from yobx_flatten import flattening_list, register_flattening_functions
from yobx_flatten.huggingface.caches.layers import LETTERS, OTHER_LETTERS, kind_of_code
from yobx_flatten.huggingface.caches.layouts import flatten_layers
from yobx_flatten.huggingface.recipes import transformers_recipes

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
    assert not [text.splitlines()[0] for text in sections if "```python" not in text or "```text" not in text]


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


def program(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plan_table, tried_table = program("plan_table"), program("tried_table")
STORED = json.loads((DOCS / "data" / "plans.json").read_text(encoding="utf-8"))


def test_the_table_has_every_model_and_training_and_its_numbers_are_those_of_the_machines():
    """Weights of 2 bytes, gradients, masters and two moments of 4: 18 bytes; 10 with 8 bits; adapters leave 2."""
    assert STORED.keys() == plan_table.MODELS.keys()
    assert all(tuple(trainings) == plan_table.TRAININGS for trainings in STORED.values())
    for name, trainings in STORED.items():
        stated = float(name.rpartition(" ")[2].removesuffix("B"))
        assert all(abs(found["parameters"] / 1e9 / stated - 1) < 0.25 for found in trainings.values())
        for name, each in zip(plan_table.TRAININGS, (18, 10, 2), strict=True):
            found = trainings[name]
            assert each * found["parameters"] < found["host bytes"] < (each + 1.7) * found["parameters"] + 6e9
        for found in trainings.values():
            machines = [found["machines"][size] for size in plan_table.MACHINES]
            fits = [machine["fits"] for machine in machines]
            assert fits == sorted(fits)
            times = [machine["seconds on 1"] for machine in machines if machine["fits"]]
            assert times == sorted(times, reverse=True)
            assert all(machine["seconds on 4"] < machine["seconds on 1"] for machine in machines)


@pytest.mark.slow  # seconds: a model of 28 layers is measured
def test_two_layers_stand_for_all_of_them():
    import torch

    from roundpipe_runtime.estimate import Hardware
    from roundpipe_runtime.huggingface.plan_training import PlannedTraining, model_on_meta

    name = next(iter(STORED))
    cls, sizes = plan_table.MODELS[name]
    model = model_on_meta(getattr(transformers, cls)(dtype="bfloat16", **sizes))
    card = Hardware(names=("cuda:0",), kind="cuda", host=None, host_rate=1e9, origin={}, **plan_table.MACHINES["24 GB"])
    size = {"batch": plan_table.BATCH, "length": plan_table.LENGTH, "num_microbatch": plan_table.MICROBATCHES}
    report = PlannedTraining(model, card, optim_dtype=torch.float32).report(**size)
    stored = STORED[name][plan_table.TRAININGS[0]]
    found = stored["machines"]["24 GB"]
    assert stored["parameters"] == sum(p.numel() for p in model.parameters())
    assert 0.95 * stored["host bytes"] < report.host_memory.total <= stored["host bytes"]
    assert report.simulation.time == pytest.approx(found["seconds on 1"], rel=1e-3)
    assert max(memory.total for memory in report.device_memory) == pytest.approx(found["device bytes"], rel=1e-3)


FOUND = json.loads((DOCS / "data" / "store-peer.json").read_text(encoding="utf-8"))
STORE_PAGE = (DOCS / "dev" / "store_format.md").read_text(encoding="utf-8")


def test_the_table_of_the_guide_is_the_measured_one():
    rows = STORE_PAGE.partition("| value | onnx-diagnostic | yobx_flatten |\n|---|---|---|\n")[2].splitlines()
    expected = [
        f"| {name} | {row['onnx-diagnostic']} | {row['yobx_flatten']} |" for name, row in FOUND["values"].items()
    ]
    assert rows == expected
    for name in ("onnx-diagnostic", "torch", "transformers"):
        assert f"{name} {FOUND['versions'][name]}" in STORE_PAGE
    assert {row["yobx_flatten"] for row in FOUND["values"].values()} == {"the same"}
    assert sum(row["onnx-diagnostic"].startswith("not ") for row in FOUND["values"].values()) > 10


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


def test_the_newest_versions_and_their_results_are_shown(tmp_path):
    assert tried_table.in_words(Requirement("torch")) == ""
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
    assert list(tried_table.lines(None))[-1] == "The newest versions are not recorded yet: `make newest` records them."
    tried_table.write_tried(tmp_path)
    assert (tmp_path / "tried.md").read_text(encoding="utf-8").startswith("| | older | development and CI | newest |")
    assert "{include} ../tables/tried.md" in (DOCS / "guide" / "install.md").read_text(encoding="utf-8")


def rows(kind):
    return {row.cls.rpartition(".")[2]: row for row in flattening_list() if row.kind == kind}


def test_every_layer_and_every_class_that_the_block_registers_is_listed_with_its_code():
    letters = {name: letter for name, letter in (LETTERS | OTHER_LETTERS).items() if hasattr(cache_utils, name)}
    letters = {getattr(cache_utils, name).__name__: letter for name, letter in letters.items()}
    assert {name: row.code for name, row in rows("layer").items() if row.since} == letters
    listed = {row.cls: row.registered_by for row in flattening_list() if row.kind != "layer"}
    with register_flattening_functions(patch_transformers=True) as undo:
        for cls, ours in undo.items():
            if cls.__module__.startswith("transformers."):
                expected = "yobx_flatten" if ours else "transformers"
                assert listed[f"{cls.__module__}.{cls.__qualname__}"] == expected
    stored = {f"{c.__module__}.{c.__qualname__}": recipe.name for c, recipe in transformers_recipes().items() if recipe}
    assert {row.cls: row.code for row in flattening_list() if row.registered_by == "yobx_flatten"} == stored


@pytest.mark.parametrize("code", ["D", "W8", "S16", "X8"])
def test_the_leaves_of_a_layer_are_those_that_it_comes_apart_into(code):
    kind, parameter = kind_of_code(code)
    layer = kind.empty(parameter)
    layer.update(torch.ones(2, 2, 3, 4), torch.ones(2, 2, 3, 4), {"cache_position": torch.arange(3)})
    _, names = flatten_layers([layer], plain=False)
    parts = [name.partition("_")[0] for name in names if name != "length"]
    row = rows("layer")[kind.cls.__name__]
    assert parts == [part for part in row.leaves.split(", ") if part != "position" or kind.has_position]
    assert ("length" in names) == ("length" in row.counters.split(", "))
