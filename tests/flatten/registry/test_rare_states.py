"""What is rare around the registries: an older library, one that was told half, and a block that is over already."""

import importlib.util
import logging
import signal
import sys
import types

import pytest
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree

from tests import fresh_process
from tests.flatten.pair import Pair, flatten, flatten_with_keys, unflatten
from yobx_flatten import Undo
from yobx_flatten.core import interrupts
from yobx_flatten.recipe.contract import Recipe
from yobx_flatten.registry.optional import Waiting
from yobx_flatten.registry.patches import AttributePatch, ImportedPatch
from yobx_flatten.registry.torch_tables import TorchCpp, TorchFx, TorchPython

RECIPE = Recipe(Pair, flatten, unflatten, flatten_with_keys, "tests:Rare", "register it")


def test_an_entry_of_a_dict_that_was_not_there_is_gone_again():
    table = {"kept": 1}
    patch = AttributePatch(table, "made", 2)
    patch.acquire()
    assert table == {"kept": 1, "made": 2}
    patch.release()
    assert table == {"kept": 1}


def test_a_module_whose_import_ends_after_the_block_is_not_patched():
    """The import began inside; the hook of the loader is called when nothing wants the patch any more."""
    patch = ImportedPatch("a_module_that_is_not_there", lambda module: pytest.fail("patched after the block"))
    patch.acquire()
    patch.release()
    patch._on_import(types.ModuleType("a_module_that_is_not_there"))


def test_a_class_of_a_module_whose_import_ends_after_the_block_is_not_registered():
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


def test_a_class_that_torch_fx_knows_without_an_exact_match_is_so_again():
    """Other code wrote the one table only."""
    fx_pytree.SUPPORTED_NODES[Pair] = flatten
    backend = TorchFx()
    try:
        found = backend.read(Pair)
        backend.write(RECIPE)
        assert Pair in fx_pytree.SUPPORTED_NODES_EXACT_MATCH
        backend.restore(RECIPE, found)
        assert fx_pytree.SUPPORTED_NODES[Pair] is flatten
        assert Pair not in fx_pytree.SUPPORTED_NODES_EXACT_MATCH
    finally:
        fx_pytree.SUPPORTED_NODES.pop(Pair, None)


def test_a_class_that_torch_knows_without_a_way_to_store_it_is_so_again():
    """Other code wrote the table of nodes only."""
    pytree.SUPPORTED_NODES[Pair] = node = pytree.NodeDef(Pair, flatten, unflatten, None)
    backend = TorchPython()
    try:
        found = backend.read(Pair)
        backend.write(RECIPE)
        assert Pair in pytree.SUPPORTED_SERIALIZED_TYPES
        backend.restore(RECIPE, found)
        assert pytree.SUPPORTED_NODES[Pair] is node
        assert Pair not in pytree.SUPPORTED_SERIALIZED_TYPES
    finally:
        pytree.SUPPORTED_NODES.pop(Pair, None)


def test_a_library_that_refuses_a_class_is_imported_all_the_same(caplog):

    def refuse(recipe):
        raise ValueError("not this one")

    waiting = Waiting("a_library_that_refuses", refuse)
    waiting.put(RECIPE)
    with caplog.at_level(logging.ERROR, logger="yobx_flatten"):
        waiting._imported(types.ModuleType("a_library_that_refuses"))
    assert "a_library_that_refuses did not accept" in caplog.text
    assert waiting._hook not in sys.meta_path


def test_jax_keeps_what_is_there_when_another_recipe_is_taken_back():
    """And is asked for its classes in the way of older versions. In a process of its own: JAX keeps threads."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    done = fresh_process.run(
        "-c",
        "import jax\n"
        "from tests.flatten.pair import Pair, flatten, flatten_with_keys, unflatten\n"
        "from yobx_flatten.recipe.contract import Recipe\n"
        "from yobx_flatten.registry.optional import Jax, _is_node\n"
        "first, second = (Recipe(Pair, flatten, unflatten, flatten_with_keys, name, '') for name in ('a', 'b'))\n"
        "ours = Jax()\n"
        "ours.write(first)\n"
        "ours.restore(second, None)\n"
        "print(ours.read(Pair) is first)\n"
        "del jax.tree_util.is_tree_node\n"
        "print(_is_node(Pair), _is_node(type('New', (), {})))\n",
    )
    assert done.stdout == "True\nTrue False\n"


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
