"""A program of `torch.fx` takes caches of the structure that it was traced with, and refuses others."""

import functools
import operator

import pytest
import torch
import torch.fx
from torch.utils import _pytree as pytree

from tests.flatten.huggingface.caches.cache_cases import made, names_of
from yobx_flatten.errors import SpecMismatchError


def traced_sum(cache):
    """A graph module that takes a cache of this structure apart as fx does."""

    def total(cache):
        return functools.reduce(operator.add, [layer.keys + layer.values for layer in cache.layers])

    holders = pytree.tree_map(lambda leaf: torch.fx.PH, cache)
    return torch.fx.symbolic_trace(total, concrete_args={"cache": holders})


def test_a_traced_program_takes_caches_of_its_structure(block):
    """Of another batch and length too."""
    program = traced_sum(made("DD"))
    assert torch.equal(program(made("DD", length=5, batch=3)), torch.full((3, 2, 5, 4), 4.0))


@pytest.mark.parametrize(("traced", "called"), [("DD", "DW"), ("DW", "WD"), ("DW", "DD"), ("DD", "DDD")])
def test_a_traced_program_refuses_another_structure(block, traced, called):
    """Its leaves would be taken in the wrong order, without a word. The error names both structures."""
    program = traced_sum(made(traced))
    with pytest.raises(SpecMismatchError) as caught:
        program(made(called))
    assert str(names_of(made(traced))) in str(caught.value)
    assert str(names_of(made(called))) in str(caught.value)


def test_a_traced_program_refuses_another_class(block):
    """Both classes are named."""
    program = traced_sum(made("DD"))
    with pytest.raises(SpecMismatchError, match=r"(?s)DynamicCache.*StaticCache"):
        program(made("SS"))
