"""A cache may hold anything in the place of its tensors for a while."""

import copy

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.flatten.huggingface.caches.cache_cases import LAYOUTS, cache_differences, made
from tests.models import WINDOW
from yobx_flatten.errors import SpecMismatchError
from yobx_flatten.huggingface.caches.functions import flatten_dynamic_cache, unflatten_dynamic_cache

PLACEHOLDERS = [None, "leaf", 7, 0, object(), torch.Size([2, 3]), torch.float32]


@pytest.mark.parametrize("placeholder", PLACEHOLDERS, ids=lambda p: type(p).__name__ if p != 0 else "zero")
@pytest.mark.parametrize("layout", [*LAYOUTS, "DDx", "XSx"])
def test_a_cache_may_hold_anything_for_a_while(block, layout, placeholder):
    """torch fills trees with names, numbers, shapes and `None`; what was filled in comes out again in its place."""
    cache = made(layout.rstrip("x"))
    if layout.endswith("x"):
        cache.layers[0] = type(cache.layers[0])(*[WINDOW, WINDOW][: 2 if layout[0] == "X" else 0])
    leaves, spec = pytree.tree_flatten(cache)
    filled = pytree.tree_unflatten([placeholder] * len(leaves), spec)
    found, found_spec = pytree.tree_flatten(filled, is_leaf=lambda node: node is placeholder)
    assert found_spec == spec
    assert all(leaf is placeholder for leaf in found)
    _, keyed_spec = pytree.tree_flatten_with_path(filled, is_leaf=lambda node: node is placeholder)
    assert keyed_spec == spec
    mapped = pytree.tree_map(lambda leaf: placeholder, cache)
    assert pytree.tree_structure(mapped, is_leaf=lambda node: node is placeholder) == spec
    assert cache_differences(pytree.tree_unflatten(leaves, found_spec), cache) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_leaf_alone_may_be_none(block, layout):
    """The gradients of a cache, say: some leaves have one, others have none."""
    leaves, spec = pytree.tree_flatten(made(layout))
    for index in range(len(leaves)):
        holes = [None if i == index else leaf for i, leaf in enumerate(leaves)]
        filled = pytree.tree_unflatten(holes, spec)
        assert pytree.tree_flatten(filled) == (holes, spec)


@pytest.mark.parametrize("layout", ["DD", "DW", "WW", "SX"])
def test_tensors_of_any_shape_may_be_filled_in(block, layout):
    cache = made(layout, length=12)
    spec = pytree.tree_structure(cache)
    for change in (torch.Tensor.sum, torch.Tensor.flatten, torch.Tensor.unsqueeze_):
        arguments = (0,) if change is torch.Tensor.unsqueeze_ else ()
        copied = copy.deepcopy(cache)
        mapped = pytree.tree_map_only(torch.Tensor, lambda leaf, c=change, a=arguments: c(leaf, *a), copied)
        assert pytree.tree_structure(mapped) == spec


def test_too_few_leaves_are_refused():
    leaves, names = flatten_dynamic_cache(made("DW"))
    with pytest.raises(SpecMismatchError, match=r"key_W8_1.* was given 3 values instead of 4"):
        unflatten_dynamic_cache(leaves[:3], names)


@pytest.mark.parametrize("count", [3, 5, 6])
def test_a_wrong_number_of_plain_leaves_is_refused(count):
    leaves, names = flatten_dynamic_cache(made("DD"))
    with pytest.raises(SpecMismatchError, match=f"key_1.* was given {count} values instead of 4"):
        unflatten_dynamic_cache((leaves * 2)[:count], names)
