"""Blocks may be nested, repeated, left in any order and in any thread: ours are in force until the last is left."""

import contextlib
import itertools

import pytest
import torch.utils._pytree as pytree
from transformers import DynamicCache

from tests.flatten import other_libraries
from tests.flatten.declare.blocks import SomethingWrongError, block, enter, in_force
from tests.flatten.registry.stepping import SteppingThread
from yobx_flatten import register_flattening_functions, unregister_cache_flattening
from yobx_flatten.huggingface.caches.functions import flatten_dynamic_cache
from yobx_flatten.registry.patches import LOCK


@pytest.mark.parametrize("error", [None, SomethingWrongError])
@pytest.mark.parametrize("inner", [block, register_flattening_functions])
def test_an_inner_block_leaves_the_outer_one_in_force(left_as_found, inner, error):
    with block():
        with contextlib.suppress(SomethingWrongError), inner():
            if error is not None:
                raise error
        assert in_force() is flatten_dynamic_cache
    assert in_force() is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_may_be_left_in_any_order(cache_of_others, left_as_found, order):
    undos, seen = [enter() for _ in range(3)], []
    for index in order:
        unregister_cache_flattening(undos[index])
        seen.append(in_force())
    assert seen == [flatten_dynamic_cache, flatten_dynamic_cache, other_libraries.their_flatten]


OVERLAPS = ["A+ B+ A- B-", "A+ B+ B- A-", "A+ A- B+ B-", "A+ B+ A- A+ B- A-"]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_blocks_of_two_threads_may_overlap(cache_of_others, left_as_found, overlap):
    with SteppingThread() as a, SteppingThread() as b:
        threads, blocks, seen = {"A": a, "B": b}, {}, []
        for thread, way in overlap.split():
            if way == "+":
                blocks[thread] = block()
                threads[thread].do(blocks[thread].__enter__)
            else:
                seen.append(threads[thread].do(in_force))
                threads[thread].do(blocks[thread].__exit__, None, None, None)
    assert set(seen) == {flatten_dynamic_cache}
    assert in_force() is other_libraries.their_flatten


def test_a_block_may_be_undone_in_another_thread(left_as_found):
    with SteppingThread() as a, SteppingThread() as b:
        undo = a.do(enter)
        inside = in_force()
        b.do(unregister_cache_flattening, undo)
    assert inside is flatten_dynamic_cache
    assert in_force() is None


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
