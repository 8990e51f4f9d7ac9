"""`check_round_trip` passes what comes back as it went; an attribute that nothing declares is refused by name."""

import collections
import contextlib
import dataclasses
import functools
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.utils._pytree as pytree

from yobx_flatten import register, register_class_flattening, unregister_class_flattening
from yobx_flatten.errors import RoundTripError
from yobx_flatten.registry.claims import REGISTRY
from yobx_flatten.registry.recipe.attributes import functions_from_fields
from yobx_flatten.registry.recipe.contract import Recipe
from yobx_flatten.registry.recipe.fields import functions_of
from yobx_flatten.registry.recipe.roundtrip import check_round_trip

T = TypeVar("T")
ONES = torch.ones(2)


@dataclasses.dataclass
class Plain:
    x: Any


@dataclasses.dataclass
class WithDefault:
    x: Any = None
    bias = None  # without an annotation it is no field


class Subclass(Plain):
    def __init__(self, x):
        super().__init__(x)
        self.bias = x + 5


@dataclasses.dataclass
class OfInit:
    x: Any
    bias: dataclasses.InitVar[Any] = None

    def __post_init__(self, bias):
        self.bias = bias


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any


class MoreSlots(Slotted):
    __slots__ = ("bias",)


class SlotsAndDict(Slotted):
    pass


@dataclasses.dataclass
class OnDict(collections.OrderedDict):
    x: Any = None

    def __post_init__(self):
        self["x"] = self.x


class Batch:
    def __init__(self, **items):
        self.items = items

    def keys(self):
        return self.items.keys()

    def values(self):
        return self.items.values()


def _with(obj, name="bias", value=ONES):
    object.__setattr__(obj, name, value)
    return obj


def _without_x():
    obj = _with(WithDefault(ONES))
    del obj.x
    return obj


HOLDERS = {
    "a subclass with its own constructor": lambda: Subclass(ONES),
    "set later": lambda: _with(Plain(ONES)),
    "a class attribute that an instance hides": lambda: _with(WithDefault(ONES)),
    "an argument of the constructor that is no field": lambda: OfInit(ONES, ONES),
    "a slot of a subclass": lambda: _with(MoreSlots(ONES)),
    "the dict of a subclass of slots": lambda: _with(SlotsAndDict(ONES)),
    "an output of a model": lambda: _with(OnDict(ONES)),
    "hidden by a default that is not set": _without_x,
    "what lists its content": lambda: _with(Batch(x=ONES)),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_an_attribute_that_is_not_declared_is_refused_by_name(holder):
    obj = HOLDERS[holder]()
    flatten, with_keys, _ = functions_of(type(obj))
    for function in (flatten, with_keys):
        with pytest.raises(RoundTripError, match=r"'bias'(.|\n)*register(_class_flattening)?\("):
            function(obj)


def test_the_line_of_the_error_keeps_it():
    obj = HOLDERS["a subclass with its own constructor"]()
    with pytest.raises(RoundTripError) as refused:
        functions_of(Subclass)[0](obj)
    (line,) = [line.strip() for line in str(refused.value).splitlines()[1:]]
    assert line == "register(Subclass, children=['x', 'bias'])"
    exec(line, {"Subclass": Subclass, "register": register})
    leaves, spec = pytree.tree_flatten(obj)
    back = pytree.tree_unflatten(leaves, spec)
    unregister_class_flattening(Subclass)
    assert back.bias is obj.bias


@dataclasses.dataclass
class Generic1(Generic[T]):
    x: Any

    @functools.cached_property
    def total(self):
        return self.x.sum()


class Stored:
    @property
    def x(self):
        return self._x

    @x.setter
    def x(self, value):
        self._x = value


def _computed():
    obj = Generic1[int](ONES)
    assert obj.total == 2
    return obj


def _stored():
    obj = Stored()
    obj.x = ONES
    return obj


KEPT = {
    "computed when it is read": (_computed, None),
    "behind a property": (_stored, ["x"]),
    "as its class has it": (lambda: _with(WithDefault(ONES), value=None), None),
    "none": (lambda: OfInit(ONES), None),
    "slots": (lambda: Slotted(ONES), None),
    "a mapping": (lambda: Batch(x=ONES), None),
}


@pytest.mark.parametrize("kept", KEPT)
def test_what_reads_the_same_afterwards_is_flattened(kept):
    make, names = KEPT[kept]
    obj = make()
    flatten, _, unflatten = functions_of(type(obj)) if names is None else functions_from_fields(type(obj), names)
    (child,), static = flatten(obj)
    assert child is ONES
    assert flatten(unflatten([child], static))[0][0] is ONES


class Defaulted:
    def __init__(self, x, extra=None, scale=1.0):
        self.x, self.extra, self.scale = x, extra, scale


@pytest.mark.parametrize("name", ["extra", "scale"])
def test_f_check_compares_values_and_not_only_names(name):
    sample = Defaulted(ONES, **{name: ONES if name == "extra" else 2.0})

    def rebuild(children, static, output_type=None):
        return Defaulted(children[0])

    def keyed(obj):
        return [(pytree.GetAttrKey("x"), obj.x)], None

    with pytest.raises(RoundTripError, match=f"attribute '{name}' is not restored"):
        register_class_flattening(Defaulted, lambda obj: ([obj.x], None), rebuild, keyed, f_check=lambda: sample)
    assert Defaulted not in pytree.SUPPORTED_NODES


class Bag:
    def __init__(self, children: list[Any], static: Any = None) -> None:
        self.children, self.static = children, static


def flatten(bag):
    return bag.children, bag.static


def unflatten(children, static):
    return Bag(list(children), static)


def recipe_for(flatten=flatten, unflatten=unflatten, flatten_with_keys=None):
    return Recipe.from_functions(Bag, flatten, unflatten, flatten_with_keys)


@contextlib.contextmanager
def in_force(recipe):
    claim = REGISTRY.claim(recipe)
    try:
        yield recipe
    finally:
        REGISTRY.release(claim)


def problem_of(recipe, bag):
    with in_force(recipe):
        try:
            check_round_trip(recipe, bag)
        except RoundTripError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    "children",
    [[], [torch.zeros(2)], [1, None, "a"], [[torch.zeros(2)], {"a": torch.ones(1)}], [float("inf")]],
    ids=["none", "a tensor", "no tensors", "containers", "a number"],
)
@pytest.mark.parametrize("static", [None, "a", (1, [2, {3: (4,)}]), torch.float16, {"a"}], ids=repr)
def test_what_comes_back_passes(children, static):
    assert problem_of(recipe_for(), Bag(children, static)) == ""


def test_the_sample_is_not_changed():
    children = [torch.zeros(2), torch.ones(2)]
    bag = Bag(children, "s")
    problem_of(recipe_for(unflatten=lambda c, s: Bag([c.pop(0), c.pop(0)], s)), bag)
    assert bag.children is children
    assert len(children) == 2


class Never:
    def __eq__(self, other):
        raise ArithmeticError

    __hash__ = None


@pytest.mark.parametrize(
    ("functions", "bag", "problem"),
    [
        ({}, type("Child", (Bag,), {})([]), "f_check of Bag returned a Child; return an instance of Bag."),
        (
            {"unflatten": lambda children, static: Bag(list(children)[:1], static)},
            Bag([torch.zeros(1), torch.zeros(1)]),
            "Bag: the rebuilt object has different children than the original (1 instead of 2",
        ),
        (  # a copy of a tensor inside a container
            {"unflatten": lambda children, static: Bag([[child[0] + 0] for child in children], static)},
            Bag([[torch.zeros(1)]]),
            "Bag: the rebuilt object has different children",
        ),
        (  # a tensor that is made by flatten
            {"flatten": lambda bag: ([child * 1 for child in bag.children], None)},
            Bag([torch.zeros(2)]),
            "f_flatten and f_flatten_with_keys disagree",
        ),
        # a spec that does not equal itself would refuse its own inputs
        ({"flatten": lambda bag: (bag.children, Never())}, Bag([]), "disagree"),
        ({}, Bag([], float("nan")), "Bag: "),
        (  # `torch.export` stops at "Unknown KeyEntry" otherwise, far from the function that gave it
            {"flatten_with_keys": lambda bag: ([("first", child) for child in bag.children], bag.static)},
            Bag([torch.zeros(1)]),
            "returns the key 'first', which torch.export does not know...(GetAttrKey('first'), obj.first)",
        ),
    ],
)
def test_a_problem_is_found(functions, bag, problem):
    found = problem_of(recipe_for(**functions), bag)
    assert all(part in found for part in problem.split("..."))


def test_leaves_that_differ_in_the_cpp_pytree_are_found():
    pytest.importorskip("torch.utils._cxx_pytree", reason="optree is not installed", exc_type=ImportError)
    recipe = recipe_for()
    cpp_only = recipe_for(flatten=lambda bag: ([], None))
    with in_force(recipe):
        backend = REGISTRY._libraries["torch"][1]
        found = backend.read(Bag)
        backend.write(cpp_only)
        try:
            with pytest.raises(RoundTripError, match="Bag: torch's C\\+\\+ pytree and its Python pytree see different"):
                check_round_trip(recipe, Bag([torch.zeros(2)]))
        finally:
            backend.restore(cpp_only, found)


class Watched(Bag):
    @functools.cached_property
    def total(self):
        return self.children[0].sum()


def test_a_tensor_in_a_list_that_is_no_child_is_named_and_one_that_is_computed_anew_may_go():
    bag = Bag([torch.zeros(2)])
    bag.scale = [torch.ones(2), None]
    assert "attribute 'scale' is not restored" in problem_of(recipe_for(), bag)
    recipe = Recipe.from_functions(Watched, flatten, lambda children, static: Watched(list(children), static), None)
    watched = Watched([torch.ones(2)])
    assert watched.total == 2
    assert problem_of(recipe, watched) == ""
