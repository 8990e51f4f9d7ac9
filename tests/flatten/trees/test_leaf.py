"""The leaves as torch sees them, with the axes that their classes declare. An object that holds itself is refused."""

import dataclasses
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from tests.flatten.nodes import Dense
from yobx_flatten import (
    InvalidArgumentError,
    check_dynamic_shapes,
    check_inputs,
    dynamic_shapes,
    export_program,
    leaves,
    make_dynamic_cache,
    make_encoder_decoder_cache,
    record_calls,
    register_class_flattening,
    register_flattening_functions,
    unregister_class_flattening,
)
from yobx_flatten.trees.walk import find_cycle

Point = namedtuple("Point", ["x", "y"])


def test_paths_are_python():
    tree = {"a": [1, (2,)], "p": Point(3, 4), "d": Dense(5, 6)}
    assert [(leaf.path, leaf.value) for leaf in leaves(tree, name="batch")] == [
        ("batch['a'][0]", 1),
        ("batch['a'][1][0]", 2),
        ("batch['p'].x", 3),
        ("batch['p'].y", 4),
        ("batch['d'].weights", 5),
        ("batch['d'].bias", 6),
    ]


def test_the_leaves_are_those_of_torch_in_its_order():
    tree = {"b": 1, "a": [None, {"x": 2}], "c": ()}
    assert [leaf.value for leaf in leaves(tree)] == pytree.tree_leaves(tree)


def test_a_leaf_alone_has_the_name_of_the_tree():
    assert [tuple(leaf) for leaf in leaves(3, name="label")] == [("label", 3, None)]


def test_a_cache_says_what_its_axes_mean():
    cache = make_dynamic_cache([(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4))])
    with register_flattening_functions(patch_transformers=True):
        both = make_encoder_decoder_cache(
            cache, make_dynamic_cache([(torch.zeros(2, 1, 5, 4), torch.zeros(2, 1, 5, 4))])
        )
        found = {leaf.path: leaf.axes for leaf in leaves({"x": torch.zeros(2), "cache": both})}
    assert found.pop("tree['x']") is None
    assert list(found.values()) == [{0: "batch", 2: "length"}] * 4


def test_a_cache_that_is_not_registered_is_a_leaf():
    """What would be is no matter: the answer fits what torch does now."""
    cache = make_dynamic_cache([(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4))])
    assert [leaf.value for leaf in leaves([cache])] == [cache]


class TimeMajor:
    def __init__(self, steps, mask):
        self.steps, self.mask = steps, mask


@pytest.mark.parametrize("with_keys", [True, False])
def test_a_registration_declares_axes(with_keys):

    def keyed(obj):
        return [(pytree.GetAttrKey("steps"), obj.steps), (pytree.GetAttrKey("mask"), obj.mask)], None

    register_class_flattening(
        TimeMajor,
        lambda obj: ([obj.steps, obj.mask], None),
        lambda children, _: TimeMajor(*children),
        keyed if with_keys else None,
        axes={"steps" if with_keys else "0": {1: "batch"}},
    )
    try:
        found = [leaf.axes for leaf in leaves(TimeMajor(torch.zeros(7, 4), torch.zeros(4)))]
    finally:
        unregister_class_flattening(TimeMajor)
    assert found == [{1: "batch"}, None]


def test_what_holds_itself_is_refused_with_its_place():
    twice = [1]
    assert [leaf.path for leaf in leaves([twice, twice, [], []])] == ["tree[0][0]", "tree[1][0]"]
    tree = {"a": [1]}
    tree["a"].append(tree)
    with pytest.raises(InvalidArgumentError, match=r"^batch\['a'\]\[1\] is batch itself(.|\n)*\n    batch"):
        leaves(tree, name="batch")


@dataclasses.dataclass
class Linked:
    x: Any
    parent: Any = None


@pytest.fixture
def linked():
    register_class_flattening(
        Linked,
        lambda obj: ([obj.x, obj.parent], None),
        lambda children, static: Linked(*children),
        lambda obj: (
            [(torch.utils._pytree.GetAttrKey("x"), obj.x), (torch.utils._pytree.GetAttrKey("parent"), obj.parent)],
            None,
        ),
    )
    yield
    unregister_class_flattening(Linked)


def _cyclic() -> Linked:
    node = Linked([torch.ones(2), Linked(torch.zeros(2))])
    node.x[1].parent = node
    return node


class Adds(torch.nn.Module):
    def forward(self, node):
        return node.x[0] + 1


def test_an_object_that_stands_in_two_places_is_no_cycle():
    shared = [1, [2]]
    assert find_cycle([shared, {"again": shared}, shared[1]]) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda node: dynamic_shapes({"node": node}),
        lambda node: check_dynamic_shapes({"node": node}, {"node": [[{0: "n"}, None], None]}),
        lambda node: export_program(Adds(), (node,)),
        lambda node: export_program(Adds(), kwargs={"node": node}, dynamic_shapes=None),
    ],
)
def test_an_object_that_holds_itself_is_refused_by_path(linked, call):
    with pytest.raises(InvalidArgumentError, match=r"(?s)node.*\.x\[1\]\.parent is .*node.* itself.*\.parent = None"):
        call(_cyclic())


def test_recorded_calls_refuse_an_object_that_holds_itself(linked):
    module = Adds()
    with pytest.raises(InvalidArgumentError, match=r"\.x\[1\]\.parent is .* itself"), record_calls(module):
        module(_cyclic())


def test_check_inputs_lists_an_object_that_holds_itself(linked):
    (finding,) = check_inputs(Adds(), (_cyclic(),)).errors
    assert finding.path == "node.x[1].parent"
    assert "node.x[1].parent is node itself" in finding.message
