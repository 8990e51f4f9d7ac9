"""Every library's backend passes the same tests: what is there is read, replaced, and brought back exactly."""

import dataclasses
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree

from tests import fresh_process, registry_snapshot
from tests.flatten import other_libraries
from tests.flatten.other_libraries import their_flatten, their_fx_match, their_fx_rule, their_unflatten
from tests.flatten.pair import Pair, flatten, flatten_with_keys, unflatten
from tests.registry_snapshot import changes_since
from yobx_flatten.errors import SpecMismatchError
from yobx_flatten.registry import tables
from yobx_flatten.registry.recipe.contract import Recipe
from yobx_flatten.registry.tables import NAMESPACE, Jax, Optree, TorchCpp, TorchFx, TorchPython

# Before the first import of `torch.utils._cxx_pytree` its backend works on a list of pending classes, and before that
# of optree and JAX theirs let recipes wait. That needs a process each, and JAX, which keeps threads, gets one as well:
# `test_it_passes_the_same_tests_in_a_process_of_its_own` runs this file again, with this variable set.
ONLY = "CONTRACT_OF"
ALONE = ["torch_cpp_pending", "optree_waiting", "jax_waiting", "jax"]
BACKENDS = [os.environ[ONLY]] if ONLY in os.environ else ["torch_python", "torch_cpp", "torch_fx", "optree"]
in_the_main_run = pytest.mark.skipif(ONLY in os.environ, reason="runs once, in the main run")


class Other(Pair):
    pass


@dataclasses.dataclass(frozen=True)
class Setting:
    name: str


@dataclasses.dataclass
class Point:
    x: Any
    y: Any


def recipe_for(cls=None, name="tests:Pair"):
    return Recipe(cls or Pair, flatten, unflatten, flatten_with_keys, name, "register it")


class Library:
    theirs = (their_flatten, their_unflatten)
    write_calls = None  # nothing is called: a list is changed
    leaves = None  # before its import the library flattens nothing

    def register(self, cls, name=None):
        other_libraries.register(cls, name=name)

    def register_after_us(self, cls):
        self.register(cls)


class PythonLibrary(Library):
    backend = TorchPython()
    write_calls = (tables, "register_python_node")

    def register_after_us(self, cls):
        pytree._deregister_pytree_node(cls)
        other_libraries.register(cls, name="theirs")

    def functions(self, cls):
        node = pytree.SUPPORTED_NODES.get(cls)
        return None if node is None else (node.flatten_fn, node.unflatten_fn)

    def leaves(self, obj):
        return pytree.tree_leaves(obj)


class OptreeLibrary(Library):
    namespace = NAMESPACE

    def __init__(self):
        self.optree = pytest.importorskip("optree", reason="optree is not installed")
        self.backend = Optree()
        self.write_calls = (self.optree, "register_pytree_node")

    def register(self, cls, name=None):
        self.optree.register_pytree_node(cls, their_flatten, their_unflatten, namespace=NAMESPACE)

    def register_after_us(self, cls):
        self.optree.unregister_pytree_node(cls, namespace=self.namespace)
        self.register(cls, "theirs")

    def functions(self, cls):
        node = sys.modules["optree.registry"]._NODETYPE_REGISTRY.get((self.namespace, cls))
        return None if node is None else (node.flatten_func, node.unflatten_func)[: len(self.theirs)]

    def leaves(self, obj):
        return self.optree.tree_leaves(obj, namespace=self.namespace)


class CppLibrary(OptreeLibrary):
    theirs = (their_flatten,)
    namespace = "torch"
    register = Library.register

    def __init__(self):
        super().__init__()
        self.backend = TorchCpp()
        import torch.utils._cxx_pytree as cxx_pytree

        self.leaves = cxx_pytree.tree_leaves


class PendingLibrary(Library):
    backend = TorchCpp()
    theirs = (their_flatten,)

    def __init__(self):
        assert "torch.utils._cxx_pytree" not in sys.modules

    def functions(self, cls):
        found = tuple(args[1] for args, _ in pytree._cxx_pytree_pending_imports if args[0] is cls)
        return found or None


class WaitingLibrary(Library):
    def __init__(self, module, backend):
        assert module not in sys.modules
        self.backend = backend

    def register(self, cls, name=None):
        pytest.skip("only we let a recipe wait: others register when the library is there")

    def functions(self, cls):
        return self.backend._recipes.get(cls)


class JaxLibrary(Library):
    def __init__(self):
        self.jax = pytest.importorskip("jax", reason="jax is not installed")
        self.backend = Jax()
        self.write_calls = (self.jax.tree_util, "register_pytree_with_keys")
        self.leaves = self.jax.tree_util.tree_leaves

    def register(self, cls, name=None):
        pytest.xfail("JAX takes one registration per class, for good: https://github.com/jax-ml/jax/issues/21666")


class FxLibrary(Library):
    backend = TorchFx()
    write_calls = (fx_pytree, "register_pytree_flatten_spec")
    theirs = (their_fx_rule, their_fx_match)

    def register(self, cls, name=None):
        fx_pytree.register_pytree_flatten_spec(cls, their_fx_rule, their_fx_match)

    def functions(self, cls):
        if cls not in fx_pytree.SUPPORTED_NODES:
            return None
        return fx_pytree.SUPPORTED_NODES[cls], fx_pytree.SUPPORTED_NODES_EXACT_MATCH[cls]

    def leaves(self, obj):
        return fx_pytree.tree_flatten_spec(obj, spec_of(obj))


def spec_of(obj):
    backend, recipe = TorchPython(), recipe_for(type(obj))
    backend.write(recipe)
    try:
        return pytree.tree_structure(obj)
    finally:
        backend.restore(recipe, None)


LIBRARIES = {
    "torch_python": PythonLibrary,
    "torch_cpp": CppLibrary,
    "torch_cpp_pending": PendingLibrary,
    "optree": OptreeLibrary,
    "optree_waiting": lambda: WaitingLibrary("optree", Optree()),
    "jax": JaxLibrary,
    "jax_waiting": lambda: WaitingLibrary("jax", Jax()),
    "torch_fx": FxLibrary,
}


@pytest.fixture(params=BACKENDS)
def library(request, monkeypatch):
    for cls in (Pair, Other, Setting, Point):  # fresh ones: JAX would remember those of the last test
        fresh = type(cls.__name__, (cls,), {"__module__": __name__, "__qualname__": cls.__qualname__})
        monkeypatch.setattr(sys.modules[__name__], cls.__name__, fresh)
    with other_libraries.forgotten_afterwards(Pair, Other, Setting, Point):
        yield LIBRARIES[request.param]()


@pytest.fixture
def backend(library):
    return library.backend


def test_a_written_class_comes_apart(library, backend):
    if library.leaves is None:
        assert library.functions(Pair) is None
        return
    backend.write(recipe_for())
    assert library.leaves(Pair(1, 2)) == [1, 2]


def test_restoring_a_class_nobody_had_leaves_nothing(backend):
    before = registry_snapshot.take()
    recipe = recipe_for()
    backend.write(recipe)
    for _ in range(2):  # the second finds nothing to do
        backend.restore(recipe, None)
        assert changes_since(before) == []
        assert backend.read(Pair) is None


@pytest.mark.parametrize("name", ["theirs", None], ids=["named", "unnamed"])
def test_theirs_come_back_by_identity(library, backend, name):
    library.register(Pair, name)
    before, found = registry_snapshot.take(), backend.read(Pair)
    recipe = recipe_for()
    backend.write(recipe)
    assert backend.read(Pair) != found
    for _ in range(2):  # the second finds what the first left
        backend.restore(recipe, found)
        assert library.functions(Pair) == library.theirs
        assert changes_since(before) == []
        assert backend.read(Pair) == found


@pytest.mark.parametrize("names", [("first", "second", "third"), (None, None, None)], ids=["named", "unnamed"])
def test_classes_restored_out_of_order_keep_their_places(library, backend, names):
    for cls, name in zip((Pair, Other, Point), names, strict=True):
        library.register(cls, name)
    before, found = registry_snapshot.take(), [backend.read(Pair), backend.read(Other)]
    recipes = [recipe_for(), recipe_for(Other, "tests:Other")]
    for recipe in recipes:
        backend.write(recipe)
    for recipe, was in zip(recipes, found, strict=True):
        backend.restore(recipe, was)
    assert changes_since(before) == []


def test_theirs_keep_their_place_when_an_earlier_class_left_meanwhile(library, backend):
    first, second = recipe_for(Other, "tests:Other"), recipe_for()
    backend.write(first)
    library.register(Pair, "second")
    library.register(Point, "third")
    found = backend.read(Pair)
    backend.write(second)
    backend.restore(first, None)
    backend.restore(second, found)
    tables = registry_snapshot.take().tables.values()
    orders = [[entry.cls for entry in table if entry.cls in (Pair, Point)] for table in tables]
    assert [order for order in orders if order] == [[Pair, Point]] * sum(map(bool, orders))


class LibraryRefusedError(Exception):
    """What a library raises in these tests."""


def raise_for_ours(function):

    def refusing(cls, flatten_function, *args, **kwargs):
        if flatten_function not in (their_flatten, their_fx_rule):
            raise LibraryRefusedError
        return function(cls, flatten_function, *args, **kwargs)

    return refusing


def test_a_write_that_fails_changes_nothing(library, backend, monkeypatch):
    if library.write_calls is None:
        assert backend.read(Pair) is None
        return
    before = registry_snapshot.take()
    with monkeypatch.context() as patched:
        patched.setattr(*library.write_calls, raise_for_ours(getattr(*library.write_calls)))
        with pytest.raises(LibraryRefusedError):
            backend.write(recipe_for())
    assert changes_since(before) == []


@in_the_main_run
@pytest.mark.parametrize("name", ["torch_cpp", "torch_fx", "optree"])
def test_a_write_over_theirs_that_fails_keeps_theirs(name, monkeypatch):
    library = LIBRARIES[name]()
    with other_libraries.forgotten_afterwards(Pair):
        library.register(Pair, "theirs")
        before = registry_snapshot.take()
        with monkeypatch.context() as patched:
            patched.setattr(*library.write_calls, raise_for_ours(getattr(*library.write_calls)))
            with pytest.raises(LibraryRefusedError):
                library.backend.write(recipe_for())
        assert library.functions(Pair) == library.theirs
        assert changes_since(before) == []


def test_what_others_registered_after_us_is_left_alone(library, backend):
    recipe = recipe_for()
    backend.write(recipe)
    library.register_after_us(Pair)
    backend.restore(recipe, None)
    assert library.functions(Pair) == library.theirs


def test_a_constant_and_a_dataclass_of_torch_come_back_as_such(backend):
    pytree.register_constant(Setting)
    pytree.register_dataclass(Point, serialized_type_name="tests.Point")
    before = registry_snapshot.take()
    for cls in (Setting, Point):
        found, recipe = backend.read(cls), recipe_for(cls, f"tests:{cls.__name__}")
        backend.write(recipe)
        backend.restore(recipe, found)
    assert pytree.is_constant_class(Setting)
    assert pytree.tree_leaves(Point(1, 2)) == [1, 2]
    assert changes_since(before) == []


@in_the_main_run
@pytest.mark.parametrize("name", ALONE)
def test_it_passes_the_same_tests_in_a_process_of_its_own(name):
    if name == "torch_cpp_pending":
        pytest.importorskip("optree", reason="optree is not installed")
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = fresh_process.run(*arguments, env={**os.environ, ONLY: name}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def python():
    with other_libraries.forgotten_afterwards(Pair, Other):
        yield TorchPython()


@in_the_main_run
def test_a_constant_is_none_while_ours_are_in_force(python):
    with other_libraries.forgotten_afterwards(Setting):
        pytree.register_constant(Setting)
        python.write(recipe_for(Setting, "tests:Setting"))
        assert not pytree.is_constant_class(Setting)


@in_the_main_run
def test_two_classes_of_one_name_are_stored_under_two_and_read_with_the_class_that_has_the_name_now(python):
    """torch remembers specs by their text; what it remembers goes with the class."""
    first, second = recipe_for(Pair, "tests:same"), recipe_for(Other, "tests:same")
    python.write(first)
    python.write(second)
    names = [pytree.SUPPORTED_SERIALIZED_TYPES[cls].serialized_type_name for cls in (Pair, Other)]
    assert names == ["tests:same", "tests:same#2"]
    stored = pytree.treespec_dumps(pytree.tree_structure(Pair(1, 2)))
    assert pytree.treespec_loads(stored).type is Pair
    python.restore(first, None)
    python.restore(second, None)
    python.write(second)
    assert pytree.treespec_loads(stored).type is Other


@in_the_main_run
def test_fx_names_the_class_it_expected_and_shows_both_structures():
    spec = spec_of(Pair(1, 2))
    with other_libraries.forgotten_afterwards(Pair):
        FxLibrary.backend.write(recipe_for())
        with pytest.raises(
            SpecMismatchError, match=r"exported with .*\.Pair among its inputs, .* call passes .*\.Other instead"
        ):
            fx_pytree.tree_flatten_spec(Other(1, 2), spec)
        with pytest.raises(SpecMismatchError, match=r"exported with: \['a'\]\n  called with:   None"):
            fx_pytree.tree_flatten_spec(Pair(1, 2), SimpleNamespace(context=["a"], type=Pair, is_leaf=lambda: False))
