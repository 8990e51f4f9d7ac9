"""An attribute that nothing declares is never dropped: flatten refuses the instance that holds it, by its name."""

import collections
import dataclasses
import functools
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.utils._pytree as pytree

from yobx_flatten import register, register_class_flattening, unregister_class_flattening
from yobx_flatten.errors import RoundTripError
from yobx_flatten.recipe.attributes import functions_from_fields
from yobx_flatten.recipe.fields import functions_of

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


HOLDERS = {
    "a subclass with its own constructor": lambda: Subclass(ONES),
    "set later": lambda: _with(Plain(ONES)),
    "a class attribute that an instance hides": lambda: _with(WithDefault(ONES)),
    "an argument of the constructor that is no field": lambda: OfInit(ONES, ONES),
    "a slot of a subclass": lambda: _with(MoreSlots(ONES)),
    "the dict of a subclass of slots": lambda: _with(SlotsAndDict(ONES)),
    "an output of a model": lambda: _with(OnDict(ONES)),
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
    """Nothing is lost, so nothing is refused."""
    make, names = KEPT[kept]
    obj = make()
    flatten, _, unflatten = functions_of(type(obj)) if names is None else functions_from_fields(type(obj), names)
    (child,), static = flatten(obj)
    assert child is ONES
    assert flatten(unflatten([child], static))[0][0] is ONES


def test_an_unset_default_does_not_hide_an_attribute():
    obj = WithDefault(ONES)
    del obj.x
    obj.bias = ONES
    with pytest.raises(RoundTripError, match="'bias'"):
        functions_of(WithDefault)[0](obj)


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
