"""Whatever goes wrong inside a block, or while it is entered, the tables are left as they were found."""

import contextlib
import itertools
import sys
import types

import pytest
from torch.export import ExportedProgram

from tests import registry_snapshot
from tests.flatten import other_libraries
from tests.flatten.declare.blocks import CACHES, SomethingWrongError, block, enter, in_force
from tests.registry_snapshot import changes_since
from yobx_flatten.declare import scopes
from yobx_flatten.huggingface.caches.functions import flatten_dynamic_cache
from yobx_flatten.registry.torch_cpp import TorchCpp
from yobx_flatten.registry.torch_python import TorchFx, TorchPython


@pytest.mark.parametrize("error", [SomethingWrongError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_inside_is_passed_on_and_all_is_put_back(left_as_found, error):
    """The block swallows nothing and leaves nothing."""
    with pytest.raises(error), block():
        raise error
    assert in_force() is None


@contextlib.contextmanager
def failing_write(backend, count):
    """The library refuses the class whose turn is `count`."""
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
    """Whichever library refuses whichever class, the classes before it are let go, and the next block works."""
    with failing_write(backend, count), pytest.raises(SomethingWrongError):
        enter()
    assert [in_force(cls) for cls in CACHES] == [None, None, None]
    with block():
        assert in_force() is flatten_dynamic_cache


@pytest.mark.parametrize("backend", [TorchPython, TorchCpp, TorchFx])
def test_a_failure_while_entering_brings_theirs_back(cache_of_others, left_as_found, backend):
    """The class that was taken over first goes back to the other library."""
    with failing_write(backend, 2), pytest.raises(SomethingWrongError):
        enter()
    assert in_force() is other_libraries.their_flatten


def test_a_with_statement_that_fails_to_enter_leaves_nothing(left_as_found):
    """Its body does not run, so there is no exit that could undo it."""
    with failing_write(TorchFx, 1), pytest.raises(SomethingWrongError), block():
        pytest.fail("the block was entered")
    assert in_force() is None


def test_an_interrupt_where_leaving_begins_still_leaves_the_block(left_as_found, monkeypatch):
    """A handler of a signal raises before anything was undone."""

    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), block():
        monkeypatch.setattr(scopes, "unregister_cache_flattening", interrupted)
    assert in_force() is None


def test_leaving_a_block_that_was_not_entered_changes_nothing(left_as_found):
    """As an `ExitStack` does whose entering was interrupted."""
    block().__exit__(None, None, None)
    assert in_force() is None


def test_a_decorated_function_has_a_block_of_its_own_at_each_call(left_as_found):
    """Also a call within a call: the inner one leaves the outer one registered."""

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
