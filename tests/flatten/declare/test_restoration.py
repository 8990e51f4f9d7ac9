"""Our functions are in force inside the block, functions of others outside, also where the block fails."""

import contextlib
import importlib.util
import itertools
import sys
import types

import pytest
import torch
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree
from torch.export import ExportedProgram
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from tests import registry_snapshot
from tests.flatten import other_libraries
from tests.flatten.declare.blocks import CACHES, SomethingWrongError, block, enter, in_force
from tests.flatten.pair import Pair, flatten, unflatten
from tests.registry_snapshot import changes_since
from yobx_flatten import (
    Undo,
    make_dynamic_cache,
    register_cache_flattening,
    register_class_flattening,
    register_flattening_functions,
    unregister_cache_flattening,
    unregister_class_flattening,
)
from yobx_flatten.declare import scopes
from yobx_flatten.errors import MissingDependencyError
from yobx_flatten.huggingface.caches.functions import flatten_dynamic_cache
from yobx_flatten.registry.torch_tables import TorchCpp, TorchFx, TorchPython


def test_theirs_step_back_for_the_block(cache_of_others, left_as_found):
    with block():
        assert in_force() is flatten_dynamic_cache
        assert fx_pytree.SUPPORTED_NODES[DynamicCache] is not other_libraries.their_fx_rule
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
    """A class that a library registers inside the block is still registered afterwards."""
    with other_libraries.forgotten_afterwards(Pair):
        with block():
            other_libraries.register(Pair, fx=True)
        assert in_force(Pair) is other_libraries.their_flatten
        assert fx_pytree.SUPPORTED_NODES[Pair] is other_libraries.their_fx_rule


def test_a_class_that_the_user_registered_keeps_her_functions(left_as_found):
    seen = []
    register_class_flattening(DynamicCache, flatten, unflatten, None)
    seen.append(in_force() is flatten)
    with block() as undo:
        seen.append(in_force() is flatten)
    seen.append(in_force() is flatten)
    unregister_class_flattening(DynamicCache)
    assert seen == [True, True, True]
    assert undo[DynamicCache] is False


@pytest.mark.parametrize("cls", [DynamicCache, Pair])
def test_the_user_may_let_go_of_her_class_inside(left_as_found, cls):
    """The block did not take it and does not give it back, whether it knows the class or not."""
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


def test_a_class_taken_away_inside_by_torch_comes_back(cache_of_others):
    with block():
        pytree._deregister_pytree_node(DynamicCache)
    assert in_force() is other_libraries.their_flatten


# transformers < 5.17 asks for the positions of the new tokens, later versions for their number
TAKES_POSITIONS = "cache_position" in DynamicLayer.get_mask_sizes.__code__.co_varnames


class Attention(torch.nn.Module):
    def forward(self, x, cache):
        for index, layer in enumerate(cache.layers):
            new = x.shape[-2]
            if TAKES_POSITIONS:
                new = torch.arange(layer.get_seq_length(), layer.get_seq_length() + new)
            length, offset = layer.get_mask_sizes(new)
            keys, values = cache.update(x, 2 * x, index)
            x = torch.nn.functional.scaled_dot_product_attention(x, keys, values) * (length + offset)
        return x


def generated():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1, 2, 3, 4, generator=generator)
    layers = ["DynamicLayer", "DynamicSlidingWindowLayer"]
    cache = make_dynamic_cache([(start, start)] * 2, layers, [{}, {"sliding_window": 8}])
    outputs = []
    for _ in range(12):
        outputs.append(Attention()(torch.randn(1, 2, 1, 4, generator=generator), cache))
    return torch.cat(outputs)


def test_a_model_runs_inside_as_outside(left_as_found):
    """Eagerly the same bits, below the window and past it: replacements are for traces."""
    outside = generated()
    with block():
        inside = generated()
    assert torch.equal(inside, outside)


def test_a_block_replaces_no_method_of_a_cache(left_as_found):
    before = [vars(cls).copy() for cls in (DynamicLayer, DynamicSlidingWindowLayer, DynamicCache)]
    with block():
        inside = [vars(cls).copy() for cls in (DynamicLayer, DynamicSlidingWindowLayer, DynamicCache)]
    assert inside == before


def test_each_class_says_whether_this_call_put_ours_in_force():
    expected = {DynamicCache, StaticCache, EncoderDecoderCache}
    if pytree.SUPPORTED_NODES[BaseModelOutput].flatten_with_keys_fn is None:  # transformers < 5.17
        expected.add(BaseModelOutput)
    first = register_cache_flattening(patch_transformers=True)
    second = register_cache_flattening(patch_transformers=True)
    unregister_cache_flattening(second)
    unregister_cache_flattening(first)
    done = {cls for cls, ours in first.items() if ours}
    assert expected <= done  # and whatever else this version of transformers has
    assert (BaseModelOutput in done) == (BaseModelOutput in expected)
    assert (second.keys(), any(second.values())) == (first.keys(), False)


def test_the_four_documented_classes_come_apart_inside_the_block():
    with register_flattening_functions(patch_transformers=True) as undo:
        nodes = {cls for cls in (DynamicCache, StaticCache, EncoderDecoderCache, BaseModelOutput) if is_node(cls)}
    assert nodes == {DynamicCache, StaticCache, EncoderDecoderCache, BaseModelOutput}
    assert not any(map(is_node, (DynamicCache, StaticCache, EncoderDecoderCache)))
    assert (type(undo), undo[DynamicCache]) == (Undo, True)


def is_node(cls):
    return cls in pytree.SUPPORTED_NODES


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
