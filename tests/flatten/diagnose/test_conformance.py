"""`check_recipe` asks of a registration what torch.export, storage and JAX will ask, whoever made it."""

import collections

import pytest
import torch
import transformers

from yobx_flatten import (
    InvalidArgumentError,
    InvalidRegistrationError,
    NotRegisteredError,
    RoundTripError,
    check_recipe,
    register_class_flattening,
    register_flattening_functions,
    unregister_class_flattening,
)
from yobx_flatten.diagnose.checks import recipe_of
from yobx_flatten.recipe.roundtrip import CHECKS
from yobx_flatten.testing import recipe_tests

X = torch.ones(2)


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
    assert problem(Bag([], (1, {"a": [X]}))).startswith(
        "Bag: its tree spec cannot be stored in a saved program: Static data holds the Tensor tensor([1., 1.])"
    )


def test_a_tensor_made_by_unflatten_is_found_by_its_operator():
    """It would be a constant of the program."""

    def unflatten_with_a_mask(children, static):
        bag = Bag(list(children), static)
        bag.mask = torch.zeros(3)
        return bag

    assert problem(Bag([X]), unflatten=unflatten_with_a_mask).startswith(
        "Bag: f_unflatten calls torch.ops.aten.zeros.default. A tensor created in f_unflatten becomes a "
        "constant of the program."
    )


def test_an_unflatten_that_looks_at_its_children_is_found():
    """torch.export puts other things in their place."""

    def unflatten_by_shape(children, static):
        bag = Bag(list(children), static)
        bag.rows = children[0].shape[0]
        return bag

    assert "f_unflatten fails with placeholders instead of the children (AttributeError" in problem(
        Bag([X]), unflatten=unflatten_by_shape
    )


def test_containers_among_the_children_stay_what_they_are():

    def unflatten_of_a_list(children, static):
        (children,) = children
        return Bag([list(children)], static)

    assert problem(Bag([[X]]), unflatten=unflatten_of_a_list) == ""


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


# -- for the tests of users ------------------------------------------------------------------------------------------

# the registrations of torch itself, which a saved program relies on
test_recipes = recipe_tests([X, {"a": X}], (X,), collections.OrderedDict(a=X), collections.deque([X]))


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
