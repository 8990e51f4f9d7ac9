"""What tests rely on: the check of registries, programs in fresh processes, and the list of long tests."""

import itertools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch.fx._pytree as fx_pytree
import torch.fx.experimental._config as fx_config
import torch.utils._pytree as pytree

from tests import conftest, fresh_process, registry_snapshot
from tests.registry_snapshot import changes_since


class Point:
    def __init__(self, x: object) -> None:
        self.x = x


def flatten(point: Point) -> tuple[list[object], None]:
    return [point.x], None


def unflatten(children: list[object], _context: None) -> Point:
    return Point(*children)


def register() -> None:
    pytree.register_pytree_node(Point, flatten, unflatten, serialized_type_name="tests.Point")


def remove() -> None:
    pytree.SUPPORTED_NODES.pop(Point, None)
    pytree.SUPPORTED_SERIALIZED_TYPES.pop(Point, None)
    pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.pop("tests.Point", None)
    pytree._cxx_pytree_pending_imports[:] = [
        entry for entry in pytree._cxx_pytree_pending_imports if entry[0][0] is not Point
    ]
    if "torch.utils._cxx_pytree" in sys.modules:
        optree_registry = sys.modules["optree.registry"]
        if ("torch", Point) in optree_registry._NODETYPE_REGISTRY:
            optree_registry.unregister_pytree_node(Point, namespace="torch")


@pytest.fixture
def before() -> Iterator[registry_snapshot.Snapshot]:
    snapshot = registry_snapshot.take()
    yield snapshot
    remove()


def test_a_class_left_registered_is_found_in_every_table_it_reached(before):
    register()
    point = f"{Point.__module__}.Point"
    cpp = registry_snapshot.OPTREE if "torch.utils._cxx_pytree" in sys.modules else registry_snapshot.PENDING
    assert changes_since(before) == [
        f"torch.utils._pytree.SUPPORTED_NODES: {point} was added",
        f"torch.utils._pytree.SUPPORTED_SERIALIZED_TYPES: {point} was added",
        f"torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE: {point} was added",
        f"{cpp}: {point} was added",
    ]


def test_a_cleanup_that_forgets_the_cpp_side_is_found(before):
    register()
    pytree._deregister_pytree_node(Point)
    (change,) = changes_since(before)
    assert change.endswith("test_registry_snapshot.Point was added")
    assert change.startswith((registry_snapshot.OPTREE, registry_snapshot.PENDING))


def test_another_function_under_the_same_class_is_found(before, monkeypatch):
    """Functions compare by identity: one that does the same is another one."""
    node = pytree.SUPPORTED_NODES[list]
    other = node._replace(flatten_fn=lambda items: node.flatten_fn(items))
    monkeypatch.setitem(pytree.SUPPORTED_NODES, list, other)
    assert changes_since(before) == ["torch.utils._pytree.SUPPORTED_NODES: builtins.list has other functions"]


@pytest.mark.parametrize("table", [pytree.SUPPORTED_NODES, fx_pytree.SUPPORTED_NODES], ids=["torch", "fx"])
def test_a_class_removed_or_put_back_at_the_end_is_found(before, table):
    """Taking a class out and putting it back moves its key: the order is part of the state."""
    found = dict(table)
    try:
        held = table.pop(list)
        assert [change.partition(": ")[2] for change in changes_since(before)] == ["builtins.list was removed"]
        table[list] = held
        (change,) = changes_since(before)
    finally:
        table.clear()
        table.update(found)
    assert "the order of the keys changed from builtins.list on" in change


def test_a_constant_and_a_setting_left_changed_are_found(before):
    """`CONSTANT_NODES` is watched, though it is a set."""
    with fx_config.patch(use_duck_shape=False):
        changes = changes_since(before)
    assert changes == ["torch.fx.experimental._config.use_duck_shape: was True, is False"]
    pytree.CONSTANT_NODES.add(Point)
    try:
        assert len(changes_since(before)) == 1
    finally:
        pytree.CONSTANT_NODES.discard(Point)


def in_a_fresh_process(*lines: str) -> str:
    program = [
        "from tests import registry_snapshot",
        "from tests.test_registry_snapshot import Point, flatten, unflatten",
        "import torch.utils._pytree as pytree",
        "before = registry_snapshot.take()",
        *lines,
        "print('\\n'.join(registry_snapshot.differences(before, registry_snapshot.take())))",
    ]
    return fresh_process.run("-c", "\n".join(program)).stdout.strip()


LEAK = "pytree.register_pytree_node(Point, flatten, unflatten, serialized_type_name='tests.Point')"


@pytest.mark.parametrize(
    "lines",
    [(LEAK, "import torch.utils._cxx_pytree"), ("import torch.utils._cxx_pytree", LEAK)],
    ids=["leak before the import", "leak after the import"],
)
def test_a_leak_beside_the_first_import_of_the_cpp_pytree_is_found(lines):
    """The import excuses only what was pending before."""
    pytest.importorskip("optree")
    assert f"{registry_snapshot.OPTREE}: tests.test_registry_snapshot.Point was added" in in_a_fresh_process(*lines)


@pytest.mark.parametrize(
    "imports",
    [
        ("from transformers.models.llama.modeling_llama import LlamaForCausalLM",),
        ("import torch.utils._cxx_pytree", "import transformers.modeling_outputs"),
        ("import transformers.modeling_outputs", "import torch.utils._cxx_pytree"),
    ],
    ids=["alone", "after the C++ pytree", "before the C++ pytree"],
)
def test_model_outputs_registered_by_their_import_are_no_change(imports):
    """transformers registers its outputs for good when a model is imported."""
    pytest.importorskip("optree")
    assert in_a_fresh_process(*imports) == ""


def test_a_model_output_defined_by_a_test_is_found():
    """The licence is for modules of transformers, not for everything that derives from `ModelOutput`."""
    made = "Mine = type('Mine', (ModelOutput,), {'__module__': 'mine'})"
    found = in_a_fresh_process("from transformers.utils import ModelOutput", made)
    assert "torch.utils._pytree.SUPPORTED_NODES: mine.Mine was added" in found


@pytest.mark.parametrize(
    ("late", "is_found"),
    [
        ("SiglipOutput()", False),
        ("pytree.register_pytree_node(SiglipOutput, lambda x: ([], None), lambda x, c: x)", True),
    ],
    ids=["by transformers", "by somebody else"],
)
def test_an_output_whose_module_was_imported_in_a_trace_is_registered_by_its_first_object(late, is_found):
    """transformers registers nothing while `torch.compiler.is_compiling()`, and catches up with the first object."""
    pytest.importorskip("transformers", minversion="5.17")
    found = in_a_fresh_process(
        "import torch, torch.utils._pytree as pytree, transformers.modeling_utils",
        "torch.compiler.is_compiling, real = (lambda: True), torch.compiler.is_compiling",
        "from transformers.models.siglip.modeling_siglip import SiglipOutput",
        "torch.compiler.is_compiling = real",
        "before = registry_snapshot.take()",
        late,
    )
    assert ("SUPPORTED_NODES: transformers.models.siglip.modeling_siglip.SiglipOutput was added" in found) == is_found


def test_the_fixture_fails_the_test_that_leaks(tmp_path):
    (tmp_path / "conftest.py").write_text("from tests.conftest import registries_left_as_found  # noqa: F401\n")
    imports = (
        "import torch.utils._pytree as pytree\nfrom tests.test_registry_snapshot import Point, flatten, unflatten\n"
    )
    program = f"{imports}def test_leaks():\n    {LEAK}\ndef test_neighbour():\n    pass\n"
    (tmp_path / "test_leak.py").write_text(program)
    options = ("-q", "-p", "no:cacheprovider", "--rootdir", tmp_path)
    done = fresh_process.run("-m", "pytest", *options, tmp_path, check=False)
    assert "2 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "SUPPORTED_NODES: tests.test_registry_snapshot.Point was added" in done.stdout


OUR_LEAK = "yobx_flatten.register_class_flattening(Point, flatten, unflatten, None, backends=('optree', 'jax'))"
OURS = "import yobx_flatten, yobx_flatten.registry.claims"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((OURS, OUR_LEAK), {registry_snapshot.WAITING, registry_snapshot.JAX}),
        ((OURS, "import optree, jax", OUR_LEAK), {registry_snapshot.OPTREE, registry_snapshot.JAX}),
        ((OURS, OUR_LEAK, "import optree, jax"), {registry_snapshot.OPTREE, registry_snapshot.JAX}),
        ((OURS, OUR_LEAK, "yobx_flatten.unregister_class_flattening(Point)", "import optree, jax"), set()),
        ((OURS, OUR_LEAK, "before = registry_snapshot.take()", "import optree, jax"), set()),
    ],
    ids=["waiting", "delivered", "waiting and delivered", "taken back", "delivered by an import"],
)
def test_a_class_left_with_optree_or_jax_is_found(lines, found):
    for library in ("optree", "jax"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    changes = in_a_fresh_process(*lines).splitlines()
    assert {change.partition(": tests.")[0] for change in changes} == found


# What a program can see of its process.
LOOKS = """
import dataclasses, json, os, pathlib, sys

@dataclasses.dataclass
class Here:
    value: int

import tests.flatten.pair
print(json.dumps([__name__, sys.argv[1:], Here.__module__, os.getcwd(), os.environ.get("SAID"), sys.path[0]]))
print("to stderr", file=sys.stderr)
sys.exit(3)
"""


def test_a_program_finds_what_a_new_interpreter_gives_it(monkeypatch):
    monkeypatch.setenv("SAID", "so")
    command = ["-c", LOOKS, "one", "two words"]
    expected = subprocess.run([sys.executable, *command], cwd=fresh_process.ROOT, capture_output=True, text=True)
    found = fresh_process.run(*command, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (3, expected.stdout, expected.stderr)
    assert expected.returncode == 3
    command = ["-m", "calendar", "2026"]
    expected = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    assert fresh_process.run(*command).stdout == expected.stdout


@pytest.mark.parametrize("imported", ["torch", fresh_process.TRAINER], ids=["torch", "trainer"])
def test_only_what_is_asked_for_is_imported(imported):
    first = ["torch", "transformers", "optree", "jax", "onnx"] if imported == "torch" else ["transformers.trainer"]
    names = [*first, "yobx_flatten", "roundpipe_runtime", "tests", "pytest"]
    program = f"import sys, threading; print(*(name in sys.modules for name in {names}), threading.active_count())"
    done = fresh_process.run("-c", program, imported=imported)
    assert done.stdout.split() == ["True", *["False"] * (len(names) - 1), "1"]


def test_a_program_that_was_started_gets_signals():
    program = "import time; print('here', flush=True)\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('there')"
    with fresh_process.start("-c", program) as started:
        started.wait_for(lambda: started.stdout == "here\n")
        assert started.poll() is None
        started.send_signal(signal.SIGINT)
        assert (started.wait(), started.stdout) == (0, "here\nthere\n")
    with fresh_process.start("-c", program) as started:
        started.send_signal(signal.SIGKILL)
        assert started.wait() == started.poll() == -9
    program = "import sys; print(1, flush=True); print(2, file=sys.stderr, flush=True); print(3)"
    with fresh_process.start("-c", program, together=True) as started:  # both outputs, in order
        assert (started.wait(), started.stdout, started.stderr) == (0, "1\n2\n3\n", "")


def test_a_program_runs_no_longer_than_it_is_needed_and_its_error_is_shown():
    with fresh_process.start("-c", "import time; time.sleep(60)") as started:
        pass
    assert started.returncode == -9
    with pytest.raises(AssertionError, match="ZeroDivisionError"), fresh_process.start("-c", "1 / 0") as started:
        started.wait_for(lambda: False)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        fresh_process.run("-c", "1 / 0")
    assert fresh_process.run("-c", "1 / 0", check=False).returncode == 1
    assert fresh_process.run("-c", "import os; os.abort()", check=False).returncode == -6


def test_a_program_that_hangs_is_killed(tmp_path):
    program = "import time\nwhile True: print(end='.', file=open('written', 'a')); time.sleep(0.01)"
    with pytest.raises(TimeoutError):
        fresh_process.run("-c", program, cwd=tmp_path, timeout=3)
    written = (tmp_path / "written").read_text()
    time.sleep(0.2)
    assert (tmp_path / "written").read_text() == written != ""
    assert fresh_process.run("-c", "print('next')").stdout == "next\n"


ROOT = conftest.LONG_TESTS.parents[1]


def test_each_line_of_the_sorted_list_names_a_test_that_is_an_extended_one(monkeypatch, tmp_path):
    lines, gone = conftest.LONG_TESTS.read_text(encoding="utf-8").splitlines(), []
    assert sorted(set(lines)) == lines
    for line in lines:
        path, *_, function = line.partition("[")[0].split("::")
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        if not re.search(rf"def {re.escape(function)}\(", text):
            gone.append(line)
    assert gone == [], "take these lines out of tests/long_tests.txt"
    listed = tmp_path / "long_tests.txt"
    listed.write_text("tests/test_a.py::test_long[1]\n", encoding="utf-8")
    monkeypatch.setattr(conftest, "LONG_TESTS", listed)
    items = [item_of("tests/test_a.py::test_long[1]"), item_of("tests/test_a.py::test_long[2]")]
    conftest.pytest_collection_modifyitems(SimpleNamespace(option=SimpleNamespace(part=None)), items)
    assert [item.marks for item in items] == [["extended"], []]


def item_of(name):
    marks = []
    return SimpleNamespace(nodeid=name, marks=marks, add_marker=marks.append)


def test_each_test_is_in_one_of_several_parts():
    """Tests of one file are in the same part: what the file makes is made once."""
    names = [f"tests/test_{number}.py::test_{letter}" for number in range(20) for letter in "ab"]
    parts = []
    for part in range(3):
        items, left_out = [*map(item_of, names)], []
        hook = SimpleNamespace(pytest_deselected=lambda items, left_out=left_out: left_out.extend(items))
        config = SimpleNamespace(option=SimpleNamespace(part=f"{part}/3"), hook=hook)
        conftest.pytest_collection_modifyitems(config, items)
        parts.append([item.nodeid for item in items])
        assert sorted(parts[-1] + [item.nodeid for item in left_out]) == sorted(names)
    assert all(parts)
    assert sorted(itertools.chain(*parts)) == sorted(names)
    files = [{name[:-1] for name in part} for part in parts]
    assert all(not (one & other) for one, other in itertools.combinations(files, 2))
