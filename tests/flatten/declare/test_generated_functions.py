"""`make_flattening_function_for_dataclass` writes the three functions of a dataclass or a mapping."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from tests.flatten.pair import Pair
from yobx_flatten import make_flattening_function_for_dataclass, register_class_flattening, unregister_class_flattening
from yobx_flatten.errors import InvalidRegistrationError


class HiddenState(dict):
    pass


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = None


@pytest.mark.parametrize("cls", [HiddenState, Point], ids=lambda cls: cls.__name__)
def test_generated_functions_register_a_class(cls):
    """The three functions pass the check, and the class comes apart."""
    flatten_fn, flatten_with_keys_fn, unflatten_fn = make_flattening_function_for_dataclass(cls, set())
    obj = cls(x=torch.zeros(2), y=torch.ones(3))
    register_class_flattening(cls, flatten_fn, unflatten_fn, flatten_with_keys_fn, f_check=lambda: obj)
    try:
        leaves = pytree.tree_leaves(obj)
    finally:
        unregister_class_flattening(cls)
    assert [tuple(leaf.shape) for leaf in leaves] == [(2,), (3,)]


def test_the_class_joins_the_supported_ones():
    """The set that is passed in collects the classes."""
    supported = {Pair}
    make_flattening_function_for_dataclass(Point, supported)
    assert supported == {Pair, Point}


def test_no_functions_are_generated_for_a_class_without_fields():
    """A class that is neither a dataclass nor mapping-like is refused, and does not join the set."""
    supported = set()
    with pytest.raises(InvalidRegistrationError, match="Pair does not declare its fields"):
        make_flattening_function_for_dataclass(Pair, supported)
    assert supported == set()


@pytest.mark.parametrize("target", [None, Point(1, 2)], ids=["None", "an instance"])
def test_no_functions_are_generated_for_what_is_no_class(target):
    """The message names the call."""
    with pytest.raises(InvalidRegistrationError, match="make_flattening_function_for_dataclass: expected a class"):
        make_flattening_function_for_dataclass(target, set())
