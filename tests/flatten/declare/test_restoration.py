"""Our functions are in force inside the block, functions of others outside, in any order of blocks and any thread."""

import contextlib
import copy
import gc
import importlib.util
import itertools
import logging
import sys
import threading
import types
import weakref

import pytest
import torch
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree
from torch.export import ExportedProgram
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from tests import fresh_process, registry_snapshot
from tests.flatten import other_libraries
from tests.flatten.declare.blocks import CACHES, SomethingWrongError, block, enter, in_force
from tests.flatten.pair import FUNCTIONS, Pair, flatten, flatten_with_keys, unflatten
from tests.flatten.registry.stepping import SteppingThread
from tests.models import go_on, start
from tests.registry_snapshot import changes_since
from yobx_flatten import (
    AlreadyRegisteredError,
    register_flattening_functions,
    unregister_cache_flattening,
    unregister_class_flattening,
)
from yobx_flatten.declare import Undo, register_cache_flattening, register_class_flattening, scopes
from yobx_flatten.errors import InvalidRegistrationError, MissingDependencyError, NotRegisteredError, RoundTripError
from yobx_flatten.huggingface.recipes import flatten_dynamic_cache
from yobx_flatten.registry.patches import LOCK
from yobx_flatten.registry.tables import TorchCpp, TorchFx, TorchPython


def test_theirs_step_back_for_the_block(cache_of_others, left_as_found):
    with block():
        assert in_force() is flatten_dynamic_cache
        assert fx_pytree.SUPPORTED_NODES[DynamicCache] is not other_libraries.their_fx_rule
    assert in_force() is other_libraries.their_flatten
    with block():  # they come back also where torch takes the class away inside
        pytree._deregister_pytree_node(DynamicCache)
    assert in_force() is other_libraries.their_flatten


def test_the_executorch_registration_of_transformers_comes_back(left_as_found):
    from transformers.integrations.executorch import register_dynamic_cache_export_support

    with other_libraries.forgotten_afterwards(DynamicCache):
        register_dynamic_cache_export_support()
        theirs, rule, before = in_force(), fx_pytree.SUPPORTED_NODES[DynamicCache], registry_snapshot.take()
        with block():
            inside, rule_inside = in_force(), fx_pytree.SUPPORTED_NODES[DynamicCache]
        assert inside is flatten_dynamic_cache
        assert rule_inside is not rule
        assert in_force() is theirs
        assert fx_pytree.SUPPORTED_NODES[DynamicCache] is rule
        assert changes_since(before) == []


def test_a_registration_made_by_others_inside_stays(left_as_found):
    with other_libraries.forgotten_afterwards(Pair):
        with block():
            other_libraries.register(Pair, fx=True)
        assert in_force(Pair) is other_libraries.their_flatten
        assert fx_pytree.SUPPORTED_NODES[Pair] is other_libraries.their_fx_rule


def test_a_class_that_the_user_registered_keeps_her_functions(left_as_found):
    register_class_flattening(DynamicCache, flatten, unflatten, None)
    with block() as undo:
        assert in_force() is flatten
    assert in_force() is flatten
    unregister_class_flattening(DynamicCache)
    assert undo[DynamicCache] is False


@pytest.mark.parametrize("cls", [DynamicCache, Pair])
def test_the_user_may_let_go_of_her_class_inside(left_as_found, cls):
    register_class_flattening(cls, flatten, unflatten, None)
    with block():
        unregister_class_flattening(cls)
        assert in_force(cls) is None


def test_a_model_output_defined_inside_stays_registered():
    """transformers registers the class when it is made, and never again."""
    # by hand: `forgotten_afterwards` needs the class, which does not exist yet
    with block():
        local = types.new_class("LocalOutput", (ModelOutput,))
    shared = pytree.SUPPORTED_SERIALIZED_TYPES[local].serialized_type_name
    try:
        assert in_force(local) is not None
        assert pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[shared] is local
    finally:
        other_libraries.forget(local)


def test_a_model_runs_inside_as_outside(left_as_found):
    """Eagerly the same bits, below the window and past it: replacements are for traces, no method is replaced."""
    classes = DynamicLayer, DynamicSlidingWindowLayer, DynamicCache
    started = start("gemma3")
    outside, before = go_on(started, copy.deepcopy(started.cache)), [vars(cls).copy() for cls in classes]
    with block():
        assert [vars(cls).copy() for cls in classes] == before
        inside = go_on(started, copy.deepcopy(started.cache))
    assert all(map(torch.equal, inside, outside))


def test_each_class_says_whether_this_call_put_ours_in_force():
    expected = {*CACHES}
    if pytree.SUPPORTED_NODES[BaseModelOutput].flatten_with_keys_fn is None:  # transformers < 5.17
        expected.add(BaseModelOutput)
    first = register_cache_flattening(patch_transformers=True)
    assert type(first) is Undo
    assert {*CACHES, BaseModelOutput} <= pytree.SUPPORTED_NODES.keys()
    second = register_cache_flattening(patch_transformers=True)
    unregister_cache_flattening(second)
    unregister_cache_flattening(first)
    assert not {*CACHES} & pytree.SUPPORTED_NODES.keys()
    done = {cls for cls, ours in first.items() if ours}
    assert expected <= done  # and whatever else this version of transformers has
    assert (BaseModelOutput in done) == (BaseModelOutput in expected)
    assert (second.keys(), any(second.values())) == (first.keys(), False)


def test_a_block_without_options_registers_nothing(before):
    with register_flattening_functions() as undo:
        assert undo == {}
        assert changes_since(before) == []


@pytest.mark.skipif(importlib.util.find_spec("diffusers") is not None, reason="diffusers is installed")
def test_a_library_that_is_missing_is_named(before):
    with pytest.raises(MissingDependencyError, match=r"needs diffusers, .*\n    pip install diffusers"):
        register_cache_flattening(patch_transformers=True, patch_diffusers=True)
    assert changes_since(before) == []


@pytest.mark.parametrize("error", [SomethingWrongError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_inside_is_passed_on_and_all_is_put_back(left_as_found, error):
    with pytest.raises(error), block():
        raise error
    assert in_force() is None


@contextlib.contextmanager
def failing_write(backend, count):
    write, calls = backend.write, itertools.count(1)

    def raise_for_one(self, recipe):
        if next(calls) == count:
            raise SomethingWrongError
        write(self, recipe)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backend, "write", raise_for_one)
        yield


@pytest.mark.parametrize("backend", [TorchPython, TorchCpp, TorchFx])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_failure_while_entering_leaves_nothing(left_as_found, backend, count):
    with failing_write(backend, count), pytest.raises(SomethingWrongError):
        enter()
    assert [in_force(cls) for cls in CACHES] == [None, None, None]
    with block():
        assert in_force() is flatten_dynamic_cache


@pytest.mark.parametrize("backend", [TorchPython, TorchCpp, TorchFx])
def test_a_failure_while_entering_brings_theirs_back(cache_of_others, left_as_found, backend):
    """The body of a `with` statement does not run then, so there is no exit that could undo it."""
    with failing_write(backend, 2), pytest.raises(SomethingWrongError), block():
        pytest.fail("the block was entered")
    assert in_force() is other_libraries.their_flatten


def test_an_interrupt_where_leaving_begins_still_leaves_the_block(left_as_found, monkeypatch):

    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), block():
        monkeypatch.setattr(scopes, "unregister_cache_flattening", interrupted)
    assert in_force() is None
    block().__exit__(None, None, None)  # as an `ExitStack` does whose entering was interrupted
    assert in_force() is None


def test_a_decorated_function_has_a_block_of_its_own_at_each_call(left_as_found):

    @block()
    def registered(depth):
        return [in_force(), *(registered(depth - 1) if depth else []), in_force()]

    assert registered(1) == [flatten_dynamic_cache] * 4
    assert in_force() is None


def test_a_block_opens_while_torch_is_still_importing_its_export_module(monkeypatch):
    """A block entered by what `import torch.export._trace` runs: there is nothing to wrap yet, and nothing fails."""
    tables, program_init, finders = registry_snapshot.take(), vars(ExportedProgram)["__init__"], list(sys.meta_path)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch.export._trace", types.ModuleType("torch.export._trace"))
        try:
            with block():
                inside = in_force()
        finally:
            after = (changes_since(tables), vars(ExportedProgram)["__init__"] is program_init, sys.meta_path == finders)
    assert inside is flatten_dynamic_cache
    assert after == ([], True, True)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_may_be_left_in_any_order(cache_of_others, left_as_found, order):
    undos, seen = [enter() for _ in range(3)], []
    for index in order:
        unregister_cache_flattening(undos[index])
        seen.append(in_force())
    assert seen == [flatten_dynamic_cache, flatten_dynamic_cache, other_libraries.their_flatten]


@pytest.mark.parametrize("overlap", ["A+ B+ A- B-", "A+ B+ B- A-", "A+ A- B+ B-", "A+ B+ A- A+ B- A-"])
def test_blocks_of_two_threads_may_overlap_and_be_undone_in_the_other_one(cache_of_others, left_as_found, overlap):
    with SteppingThread() as a, SteppingThread() as b:
        threads, blocks, seen = {"A": a, "B": b}, {}, []
        for thread, way in overlap.split():
            if way == "+":
                blocks[thread] = block()
                threads[thread].do(blocks[thread].__enter__)
            else:
                seen.append(threads[thread].do(in_force))
                threads[thread].do(blocks[thread].__exit__, None, None, None)
        undo = a.do(enter)
        seen.append(in_force())
        b.do(unregister_cache_flattening, undo)
    assert set(seen) == {flatten_dynamic_cache}
    assert in_force() is other_libraries.their_flatten


def test_many_threads_at_once_leave_what_they_found(cache_of_others, left_as_found):

    def enter_and_leave():
        for _ in range(20):
            with block():
                if in_force() is not flatten_dynamic_cache:
                    return "theirs were in force inside"
        return "fine"

    with contextlib.ExitStack() as stack:
        threads = [stack.enter_context(SteppingThread()) for _ in range(8)]
        for thread in threads:
            thread.start(enter_and_leave)
        answers = [thread.result() for thread in threads]
    assert answers == ["fine"] * 8
    assert in_force() is other_libraries.their_flatten


class Watched(type):
    """A class of such classes has something done in another thread when a table is asked for it once more."""

    def __hash__(cls):
        # with the lock in our hands, the other thread would wait for us
        if cls.then is not None and not LOCK._is_owned():
            cls.asked += 1
            if cls.asked == cls.at:
                cls.then()
        return super().__hash__()


def watched_cache():

    class OwnCache(DynamicCache, metaclass=Watched):
        asked, at, then = 0, None, None

        def __init__(self):
            super().__init__()
            self.mode = "mean"

    return OwnCache


@pytest.mark.parametrize("ways", ["enters", "leaves", "enters and leaves", "leaves and enters"])
def test_a_users_cache_is_in_force_whatever_another_thread_does_meanwhile(left_as_found, ways):
    """Another block begins or ends at each question for her class in turn; a `KeyError` came once in 5,000 times."""
    at, done = 0, True
    while done:
        at += 1
        cls, theirs = watched_cache(), []
        with SteppingThread() as other:

            def enter_other(other=other, theirs=theirs):
                theirs.append(block())
                other.do(theirs[-1].__enter__)

            def leave_other(other=other, theirs=theirs):
                other.do(theirs.pop().__exit__, None, None, None)

            def take_steps(steps=(enter_other, leave_other)):
                for way in ways.split(" and "):
                    steps["leaves" in way]()

            if ways.startswith("leaves"):
                enter_other()
            cls.at, cls.then = at, take_steps
            with block():
                done, cls.then = cls.asked >= at, None
                known = [in_force(cls)]
                while theirs:
                    leave_other()
                known.append(in_force(cls))
                leaves = pytree.tree_leaves([cls()])
        assert (None in known, leaves, in_force(cls)) == (False, [], None), at
    assert at > 2


def test_verbose_logs_the_call_and_nothing_after_it(caplog, capsys):
    register_class_flattening(Pair, *FUNCTIONS, verbose=1)
    unregister_class_flattening(Pair)
    register_class_flattening(Pair, *FUNCTIONS)
    unregister_class_flattening(Pair, verbose=1)
    expected = ["registered tests.flatten.pair.Pair", "unregistered tests.flatten.pair.Pair"]
    assert [record.getMessage() for record in caplog.records] == expected
    assert (capsys.readouterr().out, logging.getLogger("yobx_flatten").level) == ("", logging.NOTSET)


def test_verbose_is_for_one_thread(caplog):
    logger = logging.getLogger("yobx_flatten")
    other = type("Other", (Pair,), {})
    levels = []

    def meanwhile():
        levels.append(logger.level)
        register_class_flattening(other, *FUNCTIONS)
        unregister_class_flattening(other)
        levels.append(logger.isEnabledFor(logging.INFO))

    def check():
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()

    register_class_flattening(Pair, *FUNCTIONS, f_check=check, verbose=2)
    unregister_class_flattening(Pair)
    assert levels == [logging.NOTSET, False]
    assert [record.getMessage() for record in caplog.records] == ["registered tests.flatten.pair.Pair"]
    assert [(record.module, record.funcName) for record in caplog.records] == [("scopes", "register_class_flattening")]


def test_verbose_is_seen_where_no_logging_is_configured():
    code = (
        "from yobx_flatten import register_flattening_functions\n"
        "with register_flattening_functions(verbose=1): pass\n"
        "with register_flattening_functions(): pass\n"
    )
    found = fresh_process.run("-c", code)
    assert (found.stdout, found.stderr.splitlines()) == ("", ["registered: nothing new", "released: nothing"])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (None, "expected a class as first argument, found None.\n    register_class_flattening(MyClass, ...)"),
        (Pair(1, 2), "the Pair <tests.flatten.pair.Pair"),
        ("Pair", "found the str 'Pair'. Pass the class, not its name."),
        (list[int], "expected a class as first argument"),
    ],
    ids=["None", "an instance", "a name", "an alias"],
)
def test_what_is_no_class_is_refused(before, target, message):
    with pytest.raises(InvalidRegistrationError) as caught:
        register_class_flattening(target, *FUNCTIONS)
    assert "register_class_flattening: expected a class" in str(caught.value)
    assert message in str(caught.value)
    with pytest.raises(InvalidRegistrationError, match=r"\n    unregister_class_flattening\(MyClass, \.\.\.\)"):
        unregister_class_flattening("Pair")
    assert changes_since(before) == []


@pytest.mark.parametrize(
    ("position", "given", "said"),
    [
        (0, "not a function", r"f_flatten must be a function f\(obj\), found the str 'not a function'\."),
        (1, None, r"f_unflatten must be a function f\(children, static\), found None\."),
        (2, "not a function", r"f_flatten_with_keys must be a function f\(obj\), found the str 'not a function'\."),
        (0, lambda pair, other: ([], None), r"f_flatten is called as (.|\n)*"),
        (1, lambda children, static, *, needed: Pair(*children), r"f_unflatten is called as (.|\n)*"),
        (2, lambda: ([], None), r"f_flatten_with_keys is called as (.|\n)*"),
    ],
)
def test_what_cannot_be_called_as_it_will_be_is_refused(before, position, given, said):
    functions = list(FUNCTIONS)
    functions[position] = given
    with pytest.raises(InvalidRegistrationError, match=rf"^register_class_flattening\(Pair\): {said}$"):
        register_class_flattening(Pair, *functions)
    assert changes_since(before) == []


@pytest.mark.parametrize("undo", [None, {Pair: True}], ids=["None", "a dict"])
def test_only_what_a_registration_returned_can_be_undone(registered, before, undo):
    with pytest.raises(InvalidRegistrationError, match=r"\n    undo = register_cache_flattening\("):
        unregister_cache_flattening(undo)
    assert changes_since(before) == []


def test_a_registration_of_others_stays(registered_by_others, before):
    assert register_class_flattening(Pair, *FUNCTIONS) is False
    with pytest.raises(NotRegisteredError, match=r"Pair was registered by other code .* It stays registered"):
        unregister_class_flattening(Pair)
    assert changes_since(before) == []


@pytest.mark.parametrize(
    "functions", [(lambda pair: ([], None), unflatten), (flatten, unflatten, lambda pair: ([], None))]
)
def test_other_functions_are_refused(registered, before, functions):
    with pytest.raises(AlreadyRegisteredError, match=r"pair\.Pair is already .*\n    unregister_class_flattening"):
        register_class_flattening(Pair, *functions)
    assert changes_since(before) == []


def test_a_class_that_came_and_went_is_not_kept_alive():
    local = type("Local", (Pair,), {})
    reference = weakref.ref(local)
    register_class_flattening(local, flatten, lambda children, static: None, None)
    pytree.tree_leaves(local(1, 2))
    unregister_class_flattening(local)
    del local
    gc.collect()
    assert reference() is None


def sample():
    return Pair(torch.zeros(2), torch.ones(3))


@pytest.mark.parametrize("f_check", [sample, lambda: None, lambda: pytree.tree_leaves(Pair(1, 2)) == [1, 2]])
def test_a_check_that_passes_registers_and_is_run_for_a_new_class_only(f_check):
    """It may use the registration."""
    assert register_class_flattening(Pair, *FUNCTIONS, f_check=f_check) is True
    assert register_class_flattening(Pair, *FUNCTIONS, f_check=lambda: False) is False
    unregister_class_flattening(Pair)


class CheckFailedError(Exception):
    pass


def raise_check_failed(*args):
    raise CheckFailedError


@pytest.mark.parametrize("position", range(4))
def test_a_function_that_raises_undoes_the_registration(before, position):
    """The user's own exception arrives, and nothing is registered. The fourth function is `f_check` itself."""
    functions = [*FUNCTIONS, sample]
    functions[position] = raise_check_failed
    with pytest.raises(CheckFailedError):
        register_class_flattening(Pair, *functions)
    assert changes_since(before) == []


def unflatten_and_mark(children, static):
    pair = Pair(*children)
    pair.rebuilt = True
    return pair


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (
            (lambda pair: [pair.a, pair.b], unflatten, None),
            r"Pair: f_flatten must return a pair \(list of children, static part\), found list of 2",
        ),
        ((flatten, unflatten, flatten), r"Pair: f_flatten_with_keys must return \(list of \(key, child\) pairs"),
        (
            (flatten, unflatten, lambda pair: (flatten_with_keys(pair)[0][:1], None)),
            "Pair: f_flatten and f_flatten_with_keys disagree.\n.* 2 children, static None\n.* 1 children, static None",
        ),
        (
            (flatten, unflatten, lambda pair: (flatten_with_keys(pair)[0], "b")),
            "disagree.\n.* 2 children, static None\n.* 2 children, static 'b'",
        ),
        ((flatten, lambda children, static: children, None), "Pair: f_unflatten returned a list instead of a Pair"),
        (
            (flatten, lambda children, static: Pair(*children[::-1]), None),
            "Pair: the rebuilt object has different children than the original",
        ),
        (
            (flatten, lambda children, static: Pair(*[child.clone() for child in children]), None),
            "Pair: the rebuilt object has different children .* and not copy them",
        ),
        (
            (lambda pair: ([pair.a, pair.b], hasattr(pair, "rebuilt")), unflatten_and_mark, None),
            "Pair: the rebuilt object has a different static part than the original.\n.* False\n.* True",
        ),
    ],
)
def test_a_wrong_function_is_found_and_undone(before, functions, message):
    with pytest.raises(RoundTripError, match=message):
        register_class_flattening(Pair, *functions, f_check=sample)
    with pytest.raises(RoundTripError, match="f_check returned False, so Pair is not registered"):
        register_class_flattening(Pair, *FUNCTIONS, f_check=lambda: False)
    assert changes_since(before) == []
