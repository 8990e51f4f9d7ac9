"""Threads, forks and signal handlers: nobody waits for ever, and nobody's registration is lost."""

import concurrent.futures
import faulthandler
import importlib.util
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch.export._trace
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree
from torch.export import ExportedProgram

from tests.ctrl_c import interrupt_at_line, press
from yobx_flatten import register_class_flattening, register_flattening_functions, unregister_class_flattening
from yobx_flatten.core.interrupts import DeferredSignals
from yobx_flatten.registry.claims import REGISTRY
from yobx_flatten.registry.patches import LOCK
from yobx_flatten.registry.recipe.contract import Recipe
from yobx_flatten.trace.trace_settings import OPEN

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
