"""A patched attribute is put back as it was found, whoever leaves first; a hook for an import leaves nothing behind."""

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


def test_the_last_holder_puts_the_original_back(owner):
    patch = AttributePatch(owner, "method", replacement)
    seen = []
    for step in (patch.acquire, patch.acquire, patch.release, patch.release):
        step()
        seen.append(owner().method())
    assert seen == ["replaced", "replaced", "replaced", "original"]


def test_what_somebody_else_put_there_stays(owner):
    patch = AttributePatch(owner, "method", replacement)
    patch.acquire()
    owner.method = theirs = lambda self: "theirs"
    patch.release()
    assert vars(owner)["method"] is theirs


def test_a_patch_that_fails_holds_nothing():
    """Where the attribute cannot be set, a later release has nothing to undo."""
    patch = AttributePatch(int, "bit_length", replacement)
    with pytest.raises(TypeError):
        patch.acquire()
    patch = AttributePatch(int, "bit_length", replacement)
    assert vars(int)["bit_length"] is not replacement


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


# The hook for an import.


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


def test_the_action_runs_once_right_after_the_import(module_name, hook_for):
    seen = []
    hook_for(module_name, lambda module: seen.append((module.__name__, module.value)))
    module = importlib.import_module(module_name)
    assert importlib.import_module(module_name) is module
    assert seen == [(module_name, 1)]
    assert module is sys.modules[module_name]
    assert "exec_module" not in vars(module.__spec__.loader)


def test_removing_leaves_the_import_system_as_it_was(hook_for):
    before = list(sys.meta_path)
    hook = hook_for("no_such_module", lambda module: None)
    assert sys.meta_path == [hook, *before]
    hook.remove()
    hook.remove()
    assert sys.meta_path == before


def test_a_module_that_does_not_exist_is_not_found(hook_for):
    hook_for("no_such_module", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module")


def test_asking_whether_the_module_is_there_is_no_import(module_name, hook_for):
    """`find_spec` finds the module; the action waits for its execution."""
    seen = []
    hook_for(module_name, seen.append)
    spec = importlib.util.find_spec(module_name)
    assert (spec.name, seen) == (module_name, [])


def test_an_import_that_fails_runs_no_action(module_name, hook_for, tmp_path):
    (tmp_path / f"{module_name}.py").write_text("raise RuntimeError('broken')\n")
    seen = []
    hook_for(module_name, seen.append)
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module(module_name)
    assert (seen, module_name in sys.modules) == ([], False)


def test_two_hooks_for_one_module_both_act(tmp_path, monkeypatch):
    (tmp_path / "waited_for_twice.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    heard = []
    hooks = [ImportHook("waited_for_twice".__eq__, lambda module, n=n: heard.append((n, module.VALUE))) for n in (1, 2)]
    for hook in hooks:
        hook.install()
    try:
        __import__("waited_for_twice")
    finally:
        for hook in hooks:
            hook.remove()
        sys.modules.pop("waited_for_twice", None)
    assert sorted(heard) == [(1, 1), (2, 1)]


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

    def come_and_go():
        for _ in range(2000):
            hook = ImportHook("another_module".__eq__, lambda module: None)
            hook.install()
            hook.remove()

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sys.meta_path == before
