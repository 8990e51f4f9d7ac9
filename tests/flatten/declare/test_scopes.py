"""`register_cache_flattening` and the block register what they are asked for, and report it."""

import importlib.util

import pytest
import torch.utils._pytree as pytree
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from tests.registry_snapshot import changes_since
from yobx_flatten import Undo, register_cache_flattening, register_flattening_functions, unregister_cache_flattening
from yobx_flatten.errors import MissingDependencyError

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@needs_transformers
def test_each_class_says_whether_this_call_put_ours_in_force():
    """The first call registers the caches; a second one finds them."""
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


@needs_transformers
def test_the_four_documented_classes_come_apart_inside_the_block():
    """`DynamicCache`, `StaticCache`, `EncoderDecoderCache` and `BaseModelOutput`; what was done can be read inside."""
    with register_flattening_functions(patch_transformers=True) as undo:
        nodes = {cls for cls in (DynamicCache, StaticCache, EncoderDecoderCache, BaseModelOutput) if is_node(cls)}
    assert nodes == {DynamicCache, StaticCache, EncoderDecoderCache, BaseModelOutput}
    assert not any(map(is_node, (DynamicCache, StaticCache, EncoderDecoderCache)))
    assert (type(undo), undo[DynamicCache]) == (Undo, True)


def is_node(cls):
    return cls in pytree.SUPPORTED_NODES


def test_a_block_without_options_registers_nothing(before):
    """Nothing is asked for, so nothing is registered."""
    with register_flattening_functions() as undo:
        assert undo == {}
        assert changes_since(before) == []


@pytest.mark.skipif(importlib.util.find_spec("diffusers") is not None, reason="diffusers is installed")
def test_a_library_that_is_missing_is_named(before):
    """The message holds the line that installs it, and what was registered so far is undone."""
    with pytest.raises(MissingDependencyError, match=r"needs diffusers, .*\n    pip install diffusers"):
        register_cache_flattening(patch_transformers=True, patch_diffusers=True)
    assert changes_since(before) == []
