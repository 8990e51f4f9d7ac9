"""`find_unregistered` finds what torch does not flatten; `check_recipe` asks what torch.export will."""

import collections
import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given
from transformers import DynamicCache

from tests import fresh_process
from tests.flatten.core.test_compare import Trap
from yobx_flatten import (
    InvalidArgumentError,
    InvalidRegistrationError,
    NotRegisteredError,
    RoundTripError,
    check_recipe,
    find_unregistered,
    make_dynamic_cache,
    register_class_flattening,
    register_flattening_functions,
    unregister_class_flattening,
)
from yobx_flatten.diagnose.checks import recipe_of
from yobx_flatten.recipe.roundtrip import CHECKS
from yobx_flatten.testing import recipe_tests

X = torch.zeros(2, 3)


class Plain:
    def __init__(self, children):
        for name, child in zip("abcdef", children, strict=False):
            setattr(self, name, child)


class Slotted:
    __slots__ = ("a", "b", "c", "parent")

    def __init__(self, children):
        for name, child in zip("abc", children, strict=False):
            setattr(self, name, child)


@dataclasses.dataclass
class Fields:
    children: Any


class Items(dict):
    pass


class Row(list):
    pass


Pair = collections.namedtuple("Pair", ["left", "right"])  # the plain kind is the one to look at


def paths(tree, **options):
    return [found.path for found in find_unregistered(tree, **options)]


# how to make an object of its children, and whether torch takes it apart
MAKERS = {
    "list": (list, True),
    "tuple": (tuple, True),
    "dict": (lambda children: dict(zip(["x", 3, (1, "y")], children, strict=False)), True),
    "deque": (collections.deque, True),
    "pair": (lambda children: Pair(children, None), True),
    "plain": (Plain, False),
    "slotted": (Slotted, False),
    "fields": (Fields, False),
    "items": (lambda children: Items(zip("abc", children, strict=False)), False),
    "row": (Row, False),
}


@dataclasses.dataclass
class Planted:
    tree: Any
    opaque: list[Any]
    holds_tensors: bool


@st.composite
def nests(draw, back_references=False, depth=4):
    opaque: list[Any] = []
    later: list[Any] = []

    def build(depth):
        kind = draw(st.sampled_from(["tensor", "value", *MAKERS] if depth else ["tensor", "value"]))
        if kind in ("tensor", "value"):
            return (torch.zeros(1), True) if kind == "tensor" else (draw(st.sampled_from([1, "a", None, 2.5])), False)
        built = [build(depth - 1) for _ in range(draw(st.integers(0, 3)))]
        make, is_known = MAKERS[kind]
        made, holds = make([child for child, _ in built]), any(holds for _, holds in built)
        if holds and not is_known:
            opaque.append(made)
        if kind in ("plain", "slotted") and draw(st.booleans()):
            later.append(made)
        return made, holds

    tree, holds = build(depth)
    if back_references:
        for obj in later:
            obj.parent = tree
    return Planted(tree, opaque, holds)


@given(nests())
def test_all_that_is_planted_is_found_and_nothing_else(planted):
    found = find_unregistered(planted.tree)
    reached = [eval(one.path, {"tree": planted.tree}) for one in found]
    assert {id(obj) for obj in reached} == {id(obj) for obj in planted.opaque}
    assert [type(obj) for obj in reached] == [one.cls for one in found]
    assert all(one.nbytes == 4 * one.tensors > 0 for one in found)


@given(nests(back_references=True))
def test_all_that_is_planted_is_found_in_nests_that_go_round(planted):
    found = find_unregistered(planted.tree)
    reached = {id(eval(one.path, {"tree": planted.tree})) for one in found}
    assert {id(obj) for obj in planted.opaque} <= reached


def test_the_leaf_and_what_is_inside_it_are_told_apart():
    outer, inner = find_unregistered({"s": [Plain([X, Slotted([X])])]}, name="kwargs")
    assert (outer.path, outer.cls, outer.tensors, outer.inside) == ("kwargs['s'][0]", Plain, 1, None)
    assert (inner.path, inner.cls, inner.inside) == ("kwargs['s'][0].b", Slotted, "kwargs['s'][0]")


def test_the_text_names_place_class_size_and_line():
    (found,) = find_unregistered([Plain([X, torch.zeros(500)])], name="args")
    assert str(found) == (
        "args[0] is a tests.flatten.diagnose.test_opaque.Plain, which torch does not know how to flatten. It holds "
        "2 tensors, 2.02 kB. Register it first:\n"
        "    register(Plain, children=['a', 'b'])"
    )


def test_a_cache_of_transformers_is_one_finding():
    cache = DynamicCache()
    for layer in range(3):
        cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), layer)
    (found,) = find_unregistered({"past_key_values": cache}, name="kwargs")
    assert (found.path, found.tensors, found.nbytes) == ("kwargs['past_key_values']", 6, 6 * 96)
    assert found.remedy == "with register_flattening_functions(patch_transformers=True): ..."


def test_what_torch_takes_apart_is_not_found():
    tree = {"a": [X, (1, None)], "b": Pair(X, "s"), "c": Plain([1, [2]]), "d": print, "e": collections.deque([X])}
    assert paths({**tree, "f": [lambda: X, X.add_, Plain([lambda: X])]}) == []


def test_a_registered_class_is_not_found_and_what_is_in_it_is():
    flatten = lambda obj: ([obj.a], None)  # noqa: E731 # a function without a name is what many users write
    keyed = lambda obj: ([(torch.utils._pytree.GetAttrKey("a"), obj.a)], None)  # noqa: E731 # as above
    register_class_flattening(Plain, flatten, lambda children, _: Plain(list(children)), keyed)
    try:
        assert paths([Plain([Slotted([X])])]) == ["tree[0].a"]
    finally:
        unregister_class_flattening(Plain)


def test_a_flatten_function_that_fails_says_where():

    def flatten(obj):
        raise ArithmeticError("no")

    register_class_flattening(Plain, flatten, lambda children, _: None, None)
    try:
        with pytest.raises(ArithmeticError, match="no") as raised:
            find_unregistered({"a": [Plain([])]})
        assert raised.value.__notes__ == ["while tree['a'][0], tests.flatten.diagnose.test_opaque.Plain, was flattened"]
    finally:
        unregister_class_flattening(Plain)


def test_one_object_in_two_places_is_found_in_both():
    shared = Plain([X])
    assert paths([shared, {"again": shared}]) == ["tree[0]", "tree[1]['again']"]


def test_a_tensor_that_a_leaf_holds_twice_counts_once():
    (found,) = find_unregistered(Plain([X, [X, X]]))
    assert (found.path, found.tensors, found.nbytes) == ("tree", 1, 24)


def test_a_set_is_a_leaf_to_torch():
    (found,) = find_unregistered([{X}])
    assert (found.cls, found.tensors) == (set, 1)
    assert "torch flattens lists, tuples and dicts: pass one of these" in str(found)


def test_a_module_counts_with_its_parameters():
    found = find_unregistered({"m": torch.nn.Linear(2, 3)})[0]
    assert (found.path, found.tensors, found.nbytes) == ("tree['m']", 2, 36)
    assert "make it a submodule" in str(found)


def test_nothing_of_the_object_runs():
    (found,) = find_unregistered([Trap()])
    assert found.path == "tree[0]"
    assert "It holds 1 tensor, 24 bytes" in str(found)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: Plain([inner])], ids=["list", "object"])
def test_deep_nests_are_walked(wrap):
    tree = Plain([X])
    for _ in range(3000):
        tree = wrap(tree)
    assert len(paths(tree)) in (1, 3001)


def test_a_list_that_holds_itself_ends():
    """torch itself recurses until it fails."""
    tree = [Plain([X])]
    tree.append(tree)
    assert paths(tree) == ["tree[0]"]


def test_a_registered_cache_inside_an_object_is_left_alone():
    cache = make_dynamic_cache([(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))])
    outside = [found.path for found in find_unregistered(Plain([cache]))]
    with register_flattening_functions(patch_transformers=True):
        inside = [found.path for found in find_unregistered(Plain([cache]))]
    assert (outside, inside) == (["tree", "tree.a"], ["tree"])


@pytest.mark.parametrize("library", ["numpy", "jax.numpy"])
def test_arrays_count_inside_objects(library):
    arrays = pytest.importorskip(library, reason="JAX is optional")
    (found,) = find_unregistered(Plain([arrays.zeros(4, dtype="float32")]))
    assert (found.tensors, found.nbytes) == (1, 16)


def test_no_framework_is_imported():
    program = """
import sys, torch
from yobx_flatten import explain, find_unregistered
class A:
    pass
a = A()
a.x = torch.zeros(2)
print(len(find_unregistered([a])), str(explain([a]))[:4])
print(sorted({name.split(".")[0] for name in sys.modules} & {"jax", "transformers", "flax", "diffusers", "onnx"}))
"""
    assert fresh_process.run("-c", program).stdout == "1 tree\n[]\n"


SAMPLE_X = torch.ones(2)


class Bag:
    def __init__(self, children, static=None):
        self.children, self.static = children, static


def flatten(bag):
    return bag.children, bag.static


def unflatten(children, static):
    return Bag(list(children), static)


def problem(sample, flatten=flatten, unflatten=unflatten):
    register_class_flattening(Bag, flatten, unflatten, None)
    try:
        check_recipe(Bag, sample)
    except RoundTripError as error:
        return str(error)
    finally:
        unregister_class_flattening(Bag)
    return ""


def test_caches_pass():
    cache = transformers.DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    with register_flattening_functions(patch_transformers=True):
        check_recipe(transformers.DynamicCache, cache)


def test_a_class_that_torch_does_not_know_is_named():
    with pytest.raises(
        NotRegisteredError, match=r"does not know how to flatten .*Bag\. Register the class:\n    register"
    ):
        check_recipe(Bag, Bag([]))


def test_the_sample_must_be_of_the_class():
    with pytest.raises(InvalidArgumentError, match=r"expected an instance of builtins\.list, found the tuple"):
        check_recipe(list, (1,))
    with pytest.raises(InvalidRegistrationError, match="expected a class as first argument"):
        check_recipe([1], [1])


def test_a_tensor_in_the_static_part_is_found():
    assert problem(Bag([], (1, {"a": [SAMPLE_X]}))).startswith(
        "Bag: its tree spec cannot be stored in a saved program: Static data holds the Tensor tensor([1., 1.])"
    )


def test_a_tensor_made_by_unflatten_is_found_by_its_operator():
    """It would be a constant of the program."""

    def unflatten_with_a_mask(children, static):
        bag = Bag(list(children), static)
        bag.mask = torch.zeros(3)
        return bag

    assert problem(Bag([SAMPLE_X]), unflatten=unflatten_with_a_mask).startswith(
        "Bag: f_unflatten must not make tensors, but calls torch.ops.aten.zeros.default. New tensors become "
        "constants of the program."
    )


def test_an_unflatten_that_looks_at_its_children_is_found():
    """torch.export puts other things in their place."""

    def unflatten_by_shape(children, static):
        bag = Bag(list(children), static)
        bag.rows = children[0].shape[0]
        return bag

    assert "f_unflatten fails with placeholders instead of the children (AttributeError" in problem(
        Bag([SAMPLE_X]), unflatten=unflatten_by_shape
    )


def test_containers_among_the_children_stay_what_they_are():

    def unflatten_of_a_list(children, static):
        (children,) = children
        return Bag([list(children)], static)

    assert problem(Bag([[SAMPLE_X]]), unflatten=unflatten_of_a_list) == ""


def test_static_data_that_does_not_hash_is_found():
    """Lists and dicts are fine: they are frozen on the way to JAX."""

    class Loose:
        __hash__ = None

        def __eq__(self, other):
            return True

    assert problem(Bag([], [1, {"a": 2}])) == ""
    register_class_flattening(Bag, flatten, unflatten, None)
    try:
        with pytest.raises(RoundTripError, match="Loose"):
            CHECKS["the static part hashes"](recipe_of(Bag), Bag([], Loose()))
    finally:
        unregister_class_flattening(Bag)


# the registrations of torch itself, which a saved program relies on
test_recipes = recipe_tests(
    [SAMPLE_X, {"a": SAMPLE_X}],
    (SAMPLE_X,),
    collections.OrderedDict(a=SAMPLE_X),
    collections.deque([SAMPLE_X]),
)


def test_one_test_is_made_for_each_sample_and_check():
    sizes = [len(mark.args[1]) for mark in test_recipes.pytestmark]
    assert sorted(sizes) == sorted([4, len(CHECKS)])


def test_a_made_test_fails_like_the_check():
    with pytest.raises(NotRegisteredError):
        recipe_tests(Bag([]))(sample=Bag([]), check="comes back the same")


def test_what_somebody_else_registered_is_checked_as_well():
    """torch 2.13 itself gives a tuple for a `torch.Size`."""
    with pytest.raises(RoundTripError, match="Size: f_unflatten returned a tuple instead of a Size"):
        check_recipe(torch.Size, torch.Size([2, 3]))
