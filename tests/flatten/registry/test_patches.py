"""A patched attribute is put back as it was found, whoever leaves first; a hook for an import leaves nothing behind."""

import concurrent.futures
import importlib
import sys
import threading
import types

import pytest

from yobx_flatten.registry.patches import AttributePatch, ImportedPatch, ImportHook, TracePatch, tracing_here


class Base:
    def method(self):
        return "original"

    @staticmethod
    def static():
        return "original"

    @classmethod
    def of_class(cls):
        return "original"


class Child(Base):
    pass


def replacement(self):
    return "replaced"


@pytest.fixture
def owner():
    return type("Owner", (Base,), dict(vars(Base)))


def test_an_inherited_attribute_is_inherited_again():
    patch = AttributePatch(Child, "method", replacement)
    patch.acquire()
    inside = (Child().method(), Base().method())
    patch.release()
    assert inside == ("replaced", "original")
    assert "method" not in vars(Child)
    table = {"kept": 1}
    patch = AttributePatch(table, "made", 2)
    patch.acquire()
    assert table == {"kept": 1, "made": 2}
    patch.release()
    assert table == {"kept": 1}
    with pytest.raises(TypeError):  # where the attribute cannot be set
        AttributePatch(int, "bit_length", replacement).acquire()


def test_an_import_in_another_thread_meanwhile_patches_a_module_once(monkeypatch):
    """The hook has acted when the one who waited for the import comes to it: one release is enough."""
    module = types.ModuleType("imported_meanwhile")
    module.function = original = lambda: "original"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    patch = ImportedPatch(module.__name__, lambda found: AttributePatch(found, "function", replacement))
    patch.acquire()
    patch._on_import(module)
    assert module.function is replacement
    patch.release()
    assert module.function is original


def test_the_last_holder_puts_the_original_back_unless_somebody_else_put_theirs_there(owner):
    patch = AttributePatch(owner, "method", replacement)
    seen = []
    for step in (patch.acquire, patch.acquire, patch.release, patch.release):
        step()
        seen.append(owner().method())
    assert seen == ["replaced", "replaced", "replaced", "original"]
    patch.acquire()
    owner.method = theirs = lambda self: "theirs"
    patch.release()
    assert vars(owner)["method"] is theirs


@pytest.mark.parametrize("name", ["method", "static", "of_class"])
def test_a_patch_of_a_trace_is_for_the_thread_that_traces(owner, name):
    original = vars(owner)[name]
    patch = TracePatch(owner, name, lambda original: lambda *args: "replaced")
    expected = getattr(owner(), name)()
    patch.acquire()
    elsewhere: list[str] = []
    with tracing_here():
        with tracing_here():
            pass
        inside = getattr(owner(), name)()
        thread = threading.Thread(target=lambda: elsewhere.append(getattr(owner(), name)()))
        thread.start()
        thread.join()
    outside = getattr(owner(), name)()
    patch.release()
    assert (inside, elsewhere, outside) == ("replaced", [expected], expected)
    assert vars(owner)[name] is original


def test_a_patch_of_a_trace_is_stale_where_others_replaced_the_function(owner):
    """Made of their function it would bring that back after they are gone; while it is held, it stays."""
    original = vars(owner)["method"]
    owner.method = lambda self: "theirs"
    patch = TracePatch(owner, "method", lambda original: lambda self: "replaced")
    patch.acquire()
    assert patch.is_current
    patch.release()
    owner.method = original
    assert not patch.is_current
    assert TracePatch(owner, "method", lambda original: original).is_current


@pytest.fixture
def module_name(tmp_path, monkeypatch):
    name = "module_of_test_patches"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def hook_for():
    hooks = []

    def make(name, action):
        hooks.append(ImportHook(name.__eq__, action))
        hooks[-1].install()
        return hooks[-1]

    yield make
    for hook in hooks:
        hook.remove()


def test_the_action_of_each_hook_runs_once_right_after_the_import(module_name, hook_for):
    """`find_spec` finds the module; the action waits for its execution."""
    seen = []
    for number in (1, 2):
        hook_for(module_name, lambda module, number=number: seen.append((number, module.__name__, module.value)))
    assert (importlib.util.find_spec(module_name).name, seen) == (module_name, [])
    module = importlib.import_module(module_name)
    assert importlib.import_module(module_name) is module
    assert sorted(seen) == [(1, module_name, 1), (2, module_name, 1)]
    assert module is sys.modules[module_name]
    assert "exec_module" not in vars(module.__spec__.loader)


def test_removing_leaves_the_import_system_as_it_was(hook_for):
    before = list(sys.meta_path)
    hook = hook_for("no_such_module", lambda module: None)
    assert sys.meta_path == [hook, *before]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module")
    hook.remove()
    hook.remove()
    assert sys.meta_path == before


def test_an_import_that_fails_runs_no_action(module_name, hook_for, tmp_path):
    (tmp_path / f"{module_name}.py").write_text("raise RuntimeError('broken')\n")
    seen = []
    hook_for(module_name, seen.append)
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module(module_name)
    assert (seen, module_name in sys.modules) == ([], False)


class Finder:
    def __init__(self, name, action=lambda: None):
        self.name, self.action = name, action

    def find_spec(self, name, path=None, target=None):
        self.action()
        return importlib.machinery.ModuleSpec(name, self) if name == self.name else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.VALUE = 1


def test_an_import_under_way_misses_no_finder_when_a_hook_is_removed(monkeypatch):
    """Another thread leaves a block between two finders of an import: the finder after them is still asked."""
    hook = ImportHook("another_module".__eq__, lambda module: None)
    leaves, finds = Finder("", hook.remove), Finder("found_by_the_last_finder")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, leaves, finds])
    monkeypatch.setitem(sys.modules, finds.name, None)
    del sys.modules[finds.name]
    hook.install()
    assert importlib.import_module(finds.name).VALUE == 1
    assert hook not in sys.meta_path


def test_hooks_of_several_threads_leave_every_finder_in_place():
    """Blocks are entered and left by several threads at once; without a lock a finder of Python was gone for good."""
    before, interval = list(sys.meta_path), sys.getswitchinterval()

    def come_and_go(_):
        for _ in range(2000):
            hook = ImportHook("another_module".__eq__, lambda module: None)
            hook.install()
            hook.remove()

    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(come_and_go, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert sys.meta_path == before
