"""The registry counts who wants a class, and brings back what was there, whatever threads, forks and signals do."""

import concurrent.futures
import faulthandler
import importlib.util
import itertools
import logging
import os
import random
import signal
import sys
import threading
import time
import types
from collections import Counter
from typing import Any

import pytest
import torch.export._trace
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree
from torch.export import ExportedProgram

from tests import fresh_process
from tests.ctrl_c import interrupt_at_line, press
from tests.flatten.pair import Pair, flatten, flatten_with_keys, unflatten
from yobx_flatten import Undo, register_class_flattening, register_flattening_functions, unregister_class_flattening
from yobx_flatten.core import interrupts
from yobx_flatten.core.interrupts import DeferredSignals
from yobx_flatten.errors import AlreadyRegisteredError, MissingDependencyError, NotRegisteredError
from yobx_flatten.registry.claims import REGISTRY, Registry
from yobx_flatten.registry.patches import LOCK, ImportedPatch
from yobx_flatten.registry.recipe.contract import Recipe
from yobx_flatten.registry.tables import TorchCpp, TorchFx, TorchPython, _Optional
from yobx_flatten.trace.trace_settings import OPEN


class Other:
    pass


class Shelf:
    def __init__(self) -> None:
        self.held: dict[type, Any] = {}
        self.refuses = False

    def read(self, cls: type) -> Any:
        return self.held.get(cls)

    def write(self, recipe: Recipe) -> None:
        if self.refuses:
            raise KeyboardInterrupt
        self.held[recipe.cls] = recipe

    def restore(self, recipe: Recipe, found: Any) -> None:
        if found is None:
            self.held.pop(recipe.cls, None)
        else:
            self.held[recipe.cls] = found


def recipe_for(cls=Pair, flatten=flatten):
    return Recipe.from_functions(cls, flatten, unflatten, None, remedy=f"register {cls.__name__}")


@pytest.fixture
def shelves():
    return Shelf(), Shelf()


@pytest.fixture
def registry(shelves):
    return Registry({"torch": shelves})


def test_an_old_claim_does_not_end_a_new_one_and_a_claim_puts_back_what_was_taken_away(registry, shelves):
    old = registry.claim(recipe_for())
    registry.release(old)
    registry.claim(recipe_for())
    registry.release(old)
    assert registry.recipe_in_force(Pair) is not None
    del shelves[0].held[Pair]
    registry.claim(recipe_for())
    assert Pair in shelves[0].held


def test_a_user_may_neither_take_a_class_from_a_block_nor_give_it_up(registry):
    registry.claim(recipe_for())
    with pytest.raises(AlreadyRegisteredError, match="by a block") as caught:
        registry.claim_for_user(recipe_for(flatten=lambda obj: ([], 1)))
    assert "register before you enter it:\n    register_class_flattening(Pair, ...)\n    register Pair" in str(
        caught.value
    )
    with pytest.raises(NotRegisteredError, match="by a with block that unregisters it at its end:\n    register Pair"):
        registry.release_user(Pair)
    assert registry.recipe_in_force(Pair) is not None


def test_the_user_may_register_again_what_was_taken_away(registry, shelves):
    registry.claim_for_user(recipe_for())
    del shelves[0].held[Pair]
    again = recipe_for(flatten=lambda obj: ([], 1))
    assert registry.claim_for_user(again) is not None
    assert [shelf.held for shelf in shelves] == [{Pair: again}, {Pair: again}]


def test_an_unknown_class_cannot_be_given_up_and_the_remedy_outlives_the_registration(registry):
    with pytest.raises(NotRegisteredError) as caught:
        registry.release_user(Pair)
    assert str(caught.value) == (
        "unregister_class_flattening(Pair): tests.flatten.pair.Pair is not registered. To register it:\n"
        "    register_class_flattening(Pair, ...)"
    )
    claim = registry.claim(recipe_for())
    while_held = registry.remedy(Pair)
    registry.release(claim)
    assert (while_held, registry.remedy(Pair), registry.remedy(Other)) == ("register Pair", "register Pair", None)


@pytest.fixture
def two_libraries():
    shelves = {name: Shelf() for name in ("torch", "optree")}
    return Registry({name: (shelf,) for name, shelf in shelves.items()}), shelves


def test_a_second_library_that_refuses_or_fails_undoes_the_whole_call(two_libraries):
    registry, shelves = two_libraries
    registry.claim_for_user(recipe_for(), ("optree",))
    with pytest.raises(AlreadyRegisteredError):
        registry.claim_for_user(recipe_for(flatten=lambda obj: ([], 1)), ("torch", "optree"))
    assert shelves["torch"].held == {}
    registry.release_user(Pair)
    shelves["optree"].refuses = True
    with pytest.raises(KeyboardInterrupt):
        registry.claim_for_user(recipe_for(), ("torch", "optree"))
    assert shelves["torch"].held == {}
    assert registry.recipe_in_force(Pair) is None


def test_a_block_and_a_user_in_another_library_do_not_meet(two_libraries):
    registry, shelves = two_libraries
    registry.claim_for_user(recipe_for(flatten=lambda obj: ([], 1)), ("optree",))
    claim = registry.claim(recipe_for())
    assert claim is not None
    registry.release_user(Pair)
    assert list(shelves["torch"].held) == [Pair]
    registry.release(claim)
    assert [shelf.held for shelf in shelves.values()] == [{}, {}]


def test_libraries_are_chosen_by_name_and_one_that_is_not_installed_is_refused(two_libraries, monkeypatch):
    pytest.importorskip("optree", reason="optree is not installed")
    registry, _ = two_libraries
    chosen = [registry.libraries(names, "register") for names in ("optree", ("optree", "torch"), "all", ["all"])]
    assert chosen == [("optree",), ("torch", "optree"), ("torch", "optree"), ("torch", "optree")]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="which is not installed:\n    pip install optree"):
        registry.libraries("optree", "register")
    assert registry.libraries("all", "register") == ("torch", "optree")


def test_the_base_of_an_unregistered_class_is_found():
    registry = Registry({"torch": (Shelf(),)})
    sub = type("Sub", (type("Middle", (Pair,), {}),), {})
    registry.claim(recipe_for(Other))
    registry.claim_for_user(recipe_for())
    found = [registry.registered_base(cls) for cls in (sub, Pair, type("OfOther", (Other,), {}))]
    assert found == [Pair, None, None]


class Comparing:
    def __init__(self) -> None:
        self.held = []

    def __call__(self, obj):
        return [], None

    def __eq__(self, other):
        self.held.append(LOCK._is_owned())
        return NotImplemented

    def __hash__(self):
        return 0

    def __repr__(self):
        self.held.append(LOCK._is_owned())
        return "Comparing"


def test_neither_eq_nor_repr_of_a_function_runs_under_the_lock(registry):
    """Functions are compared by identity, and messages are written outside."""
    one, other = Comparing(), Comparing()
    registry.claim_for_user(recipe_for(flatten=one))
    with pytest.raises(AlreadyRegisteredError, match=r"with other functions\. Unregister"):
        registry.claim_for_user(recipe_for(flatten=other))
    assert True not in one.held + other.held


RECIPE = Recipe(Pair, flatten, unflatten, flatten_with_keys, "tests:Rare", "register it")


def test_a_module_whose_import_ends_after_the_block_is_neither_patched_nor_has_its_class_registered():
    """The import began inside; the hook of the loader is called when nothing wants the patch any more."""
    patch = ImportedPatch("a_module_that_is_not_there", lambda module: pytest.fail("patched after the block"))
    patch.acquire()
    patch.release()
    patch._on_import(types.ModuleType("a_module_that_is_not_there"))
    undo = Undo()
    undo._undo()
    undo._add(Pair, RECIPE)
    assert (Pair in undo, Pair in pytree.SUPPORTED_NODES) == (False, False)


def test_without_its_cpp_pytree_torch_has_nothing_to_register_there(monkeypatch):
    monkeypatch.setattr(pytree, "_cxx_pytree_exists", False)
    before, backend = list(pytree._cxx_pytree_pending_imports), TorchCpp()
    backend.write(RECIPE)
    assert backend.read(Pair) is None
    backend.restore(RECIPE, None)
    assert pytree._cxx_pytree_pending_imports == before


NODE = pytree.NodeDef(Pair, flatten, unflatten, None)


@pytest.mark.parametrize(
    ("make", "nodes", "held", "other"),
    [
        (TorchFx, fx_pytree.SUPPORTED_NODES, flatten, fx_pytree.SUPPORTED_NODES_EXACT_MATCH),
        (TorchPython, pytree.SUPPORTED_NODES, NODE, pytree.SUPPORTED_SERIALIZED_TYPES),
    ],
)
def test_a_class_that_torch_knows_in_one_of_two_tables_is_so_again(make, nodes, held, other):
    """Without an exact match, or without a way to store it."""
    nodes[Pair] = held
    backend = make()
    try:
        found = backend.read(Pair)
        backend.write(RECIPE)
        assert Pair in other
        backend.restore(RECIPE, found)
        assert nodes[Pair] is held
        assert Pair not in other
    finally:
        nodes.pop(Pair, None)


def test_a_library_that_refuses_a_class_is_imported_all_the_same(caplog):

    class Refusing(_Optional):
        name = "a_library_that_refuses"

        def _write(self, recipe):
            raise ValueError("not this one")

    backend = Refusing()
    backend.write(RECIPE)
    with caplog.at_level(logging.ERROR, logger="yobx_flatten"):
        backend._imported(types.ModuleType("a_library_that_refuses"))
    assert "a_library_that_refuses did not accept" in caplog.text
    assert backend._hook not in sys.meta_path


def test_jax_keeps_what_is_there_when_another_recipe_is_taken_back():
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    done = fresh_process.run(
        "-c",
        "import jax\n"
        "from tests.flatten.pair import Pair, flatten, flatten_with_keys, unflatten\n"
        "from yobx_flatten.registry.recipe.contract import Recipe\n"
        "from yobx_flatten.registry.tables import Jax\n"
        "first, second = (Recipe(Pair, flatten, unflatten, flatten_with_keys, name, '') for name in ('a', 'b'))\n"
        "ours = Jax()\n"
        "ours.write(first)\n"
        "ours.restore(second, None)\n"
        "print(ours.read(Pair) is first)\n"
        "del jax.tree_util.is_tree_node\n"
        "print(Jax().read(Pair) is not None, Jax().read(type('New', (), {})))\n",
    )
    assert done.stdout == "True\nTrue None\n"


@pytest.mark.parametrize("when", ["entering", "leaving"])
@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_a_handler_that_raises_while_handlers_are_replaced_leaves_them_as_found(when, monkeypatch):
    """A signal comes between two of them: the one that is replaced already is put back."""
    numbers, replace = interrupts._SIGNALS, interrupts._signal.signal
    before, calls = [signal.getsignal(number) for number in numbers], []

    def interrupted(number, handler):
        replace(number, handler)
        calls.append(number)
        if len(calls) == 1:
            raise KeyboardInterrupt

    deferred = interrupts.DeferredSignals()
    if when == "leaving":
        deferred.__enter__()
    monkeypatch.setattr(interrupts._signal, "signal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        deferred.__enter__() if when == "entering" else deferred.__exit__(None, None, None)
    assert [signal.getsignal(number) for number in numbers] == before


SECONDS = float(os.environ.get("YOBX_STRESS_SECONDS", "3"))
THREADS = 8


def libraries():
    found = {"torch": pytree.tree_leaves}
    if importlib.util.find_spec("optree"):
        import optree

        found["optree"] = lambda obj: optree.tree_leaves(obj, namespace="yobx_flatten")
    if importlib.util.find_spec("jax"):
        import jax

        found["jax"] = jax.tree.leaves
    return found


class Worker:
    def __init__(self, number, leaves, shared, until):
        self.random, self.leaves, self.shared, self.until = random.Random(number), leaves, shared, until
        self.done: Counter[str] = Counter()
        self.error: BaseException | None = None
        self.classes = [make_class(f"Own{number}_{i}", self) for i in range(2)]
        self.thread = threading.Thread(target=self.run, daemon=True, name=f"worker {number}")

    def run(self):
        try:
            while time.monotonic() < self.until:
                self.random.choice([self.own_class, self.shared_class, self.same_class_everywhere])()
        except BaseException as error:
            self.error = error

    def users_code(self):
        """Called from every function of a user: ours must not be inside a lock of ours then."""
        self.done["user code"] += 1
        if LOCK._is_owned():
            raise RuntimeError("a function of the user runs while a lock is held")

    def own_class(self):
        cls, flatten, unflatten = self.random.choice(self.classes)
        names = self.random.sample(list(self.leaves), self.random.randint(1, len(self.leaves)))
        registered = register_class_flattening(
            cls, flatten, unflatten, None, f_check=lambda: self.users_code() or cls(1, 2), backends=names
        )
        assert registered is True
        obj = cls(1, 2)
        for name in names:
            assert self.leaves[name](obj) == [1, 2], f"{cls.__name__} was lost in {name}"
        unregister_class_flattening(cls)
        for name in set(names) - {"jax"}:
            assert self.leaves[name](obj) == [obj], f"{cls.__name__} stayed in {name}"
        self.done["own"] += 1

    def shared_class(self):
        recipe = self.random.choice(self.shared)
        claim = REGISTRY.claim(recipe)
        assert claim is not None
        assert pytree.tree_leaves([recipe.cls(3, 4)]) == [3, 4], "a claimed class was lost"
        REGISTRY.release(claim)
        self.done["shared"] += 1

    def same_class_everywhere(self):
        tree = {"a": [1, (2, 3)], "b": {"c": 4}}
        for name, leaves in self.leaves.items():
            assert leaves(tree) == [1, 2, 3, 4], name
        self.done["builtins"] += 1


def make_class(name, worker):
    class Pair:
        def __init__(self, a: Any, b: Any) -> None:
            self.a, self.b = a, b

    Pair.__name__ = Pair.__qualname__ = name

    def flatten(pair):
        worker.users_code()
        return [pair.a, pair.b], None

    def unflatten(children, static):
        worker.users_code()
        return Pair(*children)

    return Pair, flatten, unflatten


class NoOne:
    def users_code(self):
        pass


def test_eight_threads_register_flatten_and_unregister():
    leaves = libraries()
    shared = [
        Recipe.from_functions(cls, flatten, unflatten, None)
        for cls, flatten, unflatten in (make_class(f"Shared{i}", NoOne()) for i in range(3))
    ]
    until = time.monotonic() + SECONDS
    workers = [Worker(number, leaves, shared, until) for number in range(THREADS)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads change places inside our functions, too
    try:
        for worker in workers:
            worker.thread.start()
        for worker in workers:
            worker.thread.join(SECONDS + 60)
    finally:
        sys.setswitchinterval(interval)
    if any(worker.thread.is_alive() for worker in workers):
        faulthandler.dump_traceback()
        pytest.fail("a thread waits for ever")
    assert [worker.error for worker in workers] == [None] * THREADS
    done = sum((worker.done for worker in workers), Counter())
    assert min(done[what] for what in ("own", "shared", "builtins", "user code")) > THREADS, done


def test_one_class_registered_by_all_threads_is_registered_once():
    cls, flatten, unflatten = make_class("Contested", NoOne())
    start = threading.Barrier(THREADS)

    def register(_):
        start.wait()
        return register_class_flattening(cls, flatten, unflatten, None)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(register, range(THREADS)))
    assert sorted(answers) == [False] * (THREADS - 1) + [True]
    unregister_class_flattening(cls)
    obj = cls(1, 2)
    assert pytree.tree_leaves(obj) == [obj]


def test_a_flatten_function_may_register_classes_while_another_thread_does():
    """The lock is free when a user's function runs, so the two do not wait for each other."""
    outer, _, unflatten = make_class("Outer", NoOne())
    inner = make_class("Inner", NoOne())
    flattening, registered = threading.Event(), threading.Event()

    def flatten(pair):
        flattening.set()
        assert registered.wait(30), "another thread could not register meanwhile"
        return [pair.a, pair.b], None

    def register_other():
        flattening.wait(30)
        register_class_flattening(*inner, None)
        registered.set()

    thread = threading.Thread(target=register_other)
    thread.start()
    register_class_flattening(outer, flatten, unflatten, None, f_check=lambda: outer(1, 2))
    thread.join()
    unregister_class_flattening(outer)
    unregister_class_flattening(inner[0])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_libraries_of_one_class_go_in_any_order(order):
    pytest.importorskip("optree", reason="optree is not installed")
    leaves = libraries()
    cls, flatten, unflatten = make_class("Layered", NoOne())
    recipe = Recipe.from_functions(cls, flatten, unflatten, None)
    claims = [REGISTRY.claim(recipe), REGISTRY.claim(recipe), REGISTRY.claim_for_user(recipe, ("torch", "optree"))]
    obj = cls(1, 2)
    for index in order:
        REGISTRY.release(claims[index])
        held = set(order) - set(order[: order.index(index) + 1])
        assert leaves["torch"](obj) == ([1, 2] if held & {0, 1} else [obj])
        assert leaves["optree"](obj) == ([1, 2] if 2 in held else [obj])


handles_ctrl_c = pytest.mark.usefixtures("python_handles_ctrl_c")
STEP = 41  # by hand, every line was tried


@handles_ctrl_c
def test_handlers_are_called_at_the_end():
    """Python calls handlers in the main thread only: other threads leave them alone."""
    done = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: done.append("alarm"))

    def elsewhere():
        with DeferredSignals():
            return signal.getsignal(signal.SIGINT)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(elsewhere).result() is signal.default_int_handler

    def block():
        with DeferredSignals():
            with DeferredSignals():
                press()
                signal.raise_signal(signal.SIGALRM)
            done.append("last line")

    try:
        with pytest.raises(KeyboardInterrupt):
            block()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert done == ["last line", "alarm"]


@handles_ctrl_c
@pytest.mark.parametrize("first", range(12))
def test_handlers_are_back_whatever_line_was_interrupted(first):

    def block():
        with DeferredSignals():
            pass

    for number in itertools.count(first, 12):
        try:
            pressed = interrupt_at_line(number, block, files=("core/interrupts.py",))
        except KeyboardInterrupt:
            pressed = True
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not pressed:
            break


def state():
    return (
        list(pytree.SUPPORTED_NODES.items()),
        list(pytree.SUPPORTED_SERIALIZED_TYPES.items()),
        list(pytree._cxx_pytree_pending_imports),
        list(fx_pytree.SUPPORTED_NODES.items()),
        dict(REGISTRY._slots),
        list(OPEN),
        list(sys.meta_path),
        vars(ExportedProgram)["__init__"],
        vars(torch.export._trace)["_export"],
        LOCK._is_owned(),
    )


def enter_and_leave():
    with register_flattening_functions(patch_transformers=True):
        pass


@handles_ctrl_c
@pytest.mark.parametrize(
    "files", [("scopes.py", "core/interrupts.py"), ("",)], ids=["the block's own lines", "all lines"]
)
def test_an_interruption_before_any_line_leaves_everything_as_found(files):
    """Before every line of the block's own; of those that it calls, before one in many."""
    enter_and_leave()
    before, interrupted = state(), 0
    step = STEP if files == ("",) else 1
    for number in itertools.count(0, step):
        try:
            pressed = interrupt_at_line(number, enter_and_leave, files=files)
        except KeyboardInterrupt:
            pressed = True
            interrupted += 1
        assert state() == before, f"line {number}"
        if not pressed:
            break
    assert interrupted > 30
