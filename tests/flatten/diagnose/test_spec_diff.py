"""`compare_specs` names the places in which two structures differ, and what stands there."""

import collections
import dataclasses

import pytest
import torch
import torch.utils._pytree as pytree
import transformers
from hypothesis import given

from tests.flatten.diagnose.test_opaque import nests
from yobx_flatten import (
    InvalidArgumentError,
    compare_specs,
    register,
    register_flattening_functions,
    unregister_class_flattening,
)
from yobx_flatten.diagnose.comparison import compare_spec_texts

Pair = collections.namedtuple("Pair", ["left", "right"])  # the plain kind, whose spec is unlike the others


@dataclasses.dataclass
class HeldState:
    hidden: object
    step: int = dataclasses.field(default=1, metadata={"static": True})


@pytest.fixture(autouse=True)
def _state_is_registered():
    register(HeldState, backends="torch")
    yield
    unregister_class_flattening(HeldState)


DIFFERENCES = [
    pytest.param([1, 2], [1], [("tree", "list of 2", "list of 1")], id="length"),
    pytest.param([1, (2,)], [1, [2]], [("tree[1]", "tuple of 1", "list of 1")], id="class"),
    pytest.param({"a": 1}, {"a": [1]}, [("tree['a']", "a leaf", "list of 1")], id="leaf"),
    pytest.param(
        {"a": 1, "b": 2},
        {"a": 1, "c": 3},
        [("tree['b']", "a leaf", "not there"), ("tree['c']", "not there", "a leaf")],
        id="keys",
    ),
    pytest.param(
        {"a": 1, "b": 2}, {"b": 1, "a": 2}, [("tree", "in the order ['a'], ['b']", "['b'], ['a']")], id="order"
    ),
    pytest.param([HeldState(1, 5)], [HeldState(1, 6)], [("tree[0]", "static [5]", "static [6]")], id="static"),
    pytest.param(HeldState([1]), HeldState(1), [("tree.hidden", "list of 1", "a leaf")], id="field"),
    pytest.param(
        ((1,), {"x": 1, "y": [1]}),
        ((1,), {"x": 1, "y": [1, 2]}),
        [("kwargs['y']", "list of 1", "list of 2")],
        id="call",
    ),
]


@pytest.mark.parametrize(("first", "second", "expected"), DIFFERENCES)
def test_each_difference_has_its_place(first, second, expected):
    texts = [str(pytree.tree_structure(tree)) for tree in (first, second)]
    for found in (compare_specs(first, second), compare_spec_texts(*texts, ("first", "second"))):
        assert [(one.path, one.first, one.second) for one in found] == expected


def test_named_tuples_are_told_apart():
    (found,) = compare_specs(Pair(1, [2]), Pair(1, 2))
    assert (found.path, found.first, found.second) == ("tree.right", "list of 1", "a leaf")


@given(nests())
def test_specs_differ_exactly_when_there_is_a_difference(planted):
    """Against the comparison of torch, on any nest and a changed one."""
    spec = pytree.tree_structure(planted.tree)
    other = pytree.tree_structure([planted.tree, 1])
    assert compare_specs(spec, spec) == []
    assert bool(compare_specs(spec, other)) == (spec != other)


def test_the_text_shows_both_values_under_the_path():
    (found,) = compare_specs([1, 2], (1, 2), name="outputs", names=("exported", "called"))
    assert str(found) == "outputs\n    exported: list of 2\n    called:   tuple of 2"


def test_a_program_is_compared_by_its_inputs():

    class Takes(torch.nn.Module):
        def forward(self, x, y):
            return x

    x = torch.ones(2)
    program = torch.export.export(Takes(), (x,), {"y": {"a": x + 1}})
    assert compare_specs(program, ((x,), {"y": {"a": x}})) == []
    (found,) = compare_specs(program, ((x,), {"y": x}))
    assert (found.path, found.first, found.second) == ("kwargs['y']", "dict with ['a']", "a leaf")


def test_caches_of_other_layers_differ_in_the_names_of_their_leaves():

    def cache(layers):
        made = transformers.DynamicCache()
        for layer in range(layers):
            made.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), layer)
        return made

    with register_flattening_functions(patch_transformers=True):
        found = compare_specs({"past": cache(1)}, {"past": cache(2)})
    assert [(one.path, one.first, one.second) for one in found] == [
        ("tree['past']['key_1']", "not there", "a leaf"),
        ("tree['past']['value_1']", "not there", "a leaf"),
    ]


@pytest.mark.parametrize("text", ["", "TreeSpec", "TreeSpec(list, None, [*)", "PyTreeSpec([*, *])"])
def test_a_text_that_is_no_spec_gives_none(text):
    """A future torch may print another form."""
    assert compare_spec_texts(text, text, ("a", "b")) is None


def test_names_must_be_two():
    with pytest.raises(InvalidArgumentError, match="names must be a pair"):
        compare_specs(1, 2, names=("one",))
