"""Functions read off a class take its instances apart by their fields or keys, and put them together untouched."""

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
import torch.utils._pytree as pytree

from yobx_flatten.errors import InvalidRegistrationError
from yobx_flatten.fields import functions_of, is_mapping_like, snake_case


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = None
    count: ClassVar[int] = 0


@dataclasses.dataclass
class Named:
    value: Any
    name: str = dataclasses.field(default="", metadata={"static": True})


@dataclasses.dataclass
class OnlyStatic:
    name: str = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any


@dataclasses.dataclass
class Checked:
    x: Any
    double: Any = dataclasses.field(init=False)

    def __post_init__(self):
        if not isinstance(self.x, int):
            raise TypeError("x must be an integer")
        self.double = 2 * self.x


@dataclasses.dataclass
class Empty:
    pass


class Mapping:
    """Has `keys` and `values`, and is no dict."""

    def __init__(self, **items):
        self.items_ = items

    def keys(self):
        return self.items_.keys()

    def values(self):
        return self.items_.values()


class State(dict):
    pass


@pytest.mark.parametrize(
    ("name", "spelt"),
    [
        ("HiddenState", "hidden_state"),
        ("BaseModelOutput", "base_model_output"),
        ("CausalLMOutputWithPast", "causal_lm_output_with_past"),
        ("UNet2DOutput", "u_net2_d_output"),
        ("Point", "point"),
        ("_Private", "_private"),
        ("already_snake", "already_snake"),
    ],
)
def test_a_class_name_is_spelt_as_a_function_name(name, spelt):
    """Words are split before capitals; runs of capitals are one word."""
    assert snake_case(name) == spelt


def test_functions_are_named_after_the_class():
    """The documented names, and a docstring."""
    functions = functions_of(State)
    assert [f.__name__ for f in functions] == ["flatten_state", "flatten_with_keys_state", "unflatten_state"]
    assert [f.__doc__ for f in functions] == ["flatten for State", "flatten_with_keys for State", "unflatten for State"]


@pytest.mark.parametrize(("cls", "answer"), [(State, True), (Mapping, True), (Point, False), (list, False)])
def test_a_class_with_keys_and_values_is_mapping_like(cls, answer):
    """Both methods are needed, on the class."""
    assert is_mapping_like(cls) is answer


def test_a_dict_subclass_comes_apart_by_its_keys():
    """Children are the values, in order, and the static part is the keys."""
    flatten, flatten_with_keys, unflatten = functions_of(State)
    state = State(b=1, a=2)
    assert flatten(state) == ([1, 2], ["b", "a"])
    assert flatten_with_keys(state) == ([(pytree.MappingKey("b"), 1), (pytree.MappingKey("a"), 2)], ["b", "a"])
    rebuilt = unflatten([3, 4], ["b", "a"])
    assert (type(rebuilt), list(rebuilt.items())) == (State, [("b", 3), ("a", 4)])


def test_a_dict_subclass_keeps_keys_that_are_no_names():
    """Integers and tuples are keys, too."""
    flatten, _, unflatten = functions_of(State)
    state = State({0: "a", (1, 2): "b"})
    assert unflatten(*flatten(state)) == state


def test_a_mapping_that_is_no_dict_is_built_from_names():
    """Its constructor is given the items as keyword arguments."""
    flatten, _, unflatten = functions_of(Mapping)
    rebuilt = unflatten(*flatten(Mapping(a=1, b=2)))
    assert (type(rebuilt), rebuilt.items_) == (Mapping, {"a": 1, "b": 2})


def test_a_dataclass_comes_apart_by_its_fields():
    """Children are the fields, `None` included, so that the structure does not depend on the data."""
    flatten, flatten_with_keys, unflatten = functions_of(Point)
    assert flatten(Point(1)) == ([1, None], ["x", "y"])
    assert flatten_with_keys(Point(1, 2)) == ([(pytree.GetAttrKey("x"), 1), (pytree.GetAttrKey("y"), 2)], ["x", "y"])
    assert unflatten([3, 4], ["x", "y"]) == Point(3, 4)


def test_a_static_field_is_static_data():
    """A field with `metadata={"static": True}` is not among the children, and comes back."""
    flatten, _, unflatten = functions_of(Named)
    children, static = flatten(Named(1, "one"))
    assert children == [1]
    assert static != flatten(Named(1, "two"))[1]
    assert unflatten([5], static) == Named(5, "one")


@pytest.mark.parametrize(
    ("obj", "children"),
    [(Frozen(1, 2), [1, 2]), (OnlyStatic("a"), []), (Empty(), []), (Named(7), [7])],
    ids=lambda value: type(value).__name__,
)
def test_every_kind_of_dataclass_comes_back(obj, children):
    """Frozen, slotted, with static fields only, with none at all."""
    flatten, _, unflatten = functions_of(type(obj))
    found, static = flatten(obj)
    rebuilt = unflatten(found, static)
    assert (found, type(rebuilt), rebuilt) == (children, type(obj), obj)


def test_a_dataclass_is_rebuilt_without_its_constructor():
    """`__post_init__` may refuse the placeholders of a trace, or compute anew what is there: it is not asked."""
    flatten, _, unflatten = functions_of(Checked)
    assert flatten(Checked(2)) == ([2, 4], ["x", "double"])
    rebuilt = unflatten(["placeholder", 9], ["x", "double"])
    assert (rebuilt.x, rebuilt.double) == ("placeholder", 9)


def test_children_may_be_any_iterable():
    """torch hands over lists, tuples and generators."""
    _, _, unflatten = functions_of(Point)
    assert unflatten((value for value in (1, 2)), ["x", "y"]) == Point(1, 2)


@pytest.mark.parametrize("cls", [Point, State])
@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_children_is_refused(cls, count):
    """Too few or too many children never make an object with fields missing."""
    _, _, unflatten = functions_of(cls)
    with pytest.raises(ValueError, match="zip"):
        unflatten(list(range(count)), ["x", "y"])


def test_tensors_are_not_copied():
    """The very tensors come back."""
    flatten, _, unflatten = functions_of(Point)
    point = Point(torch.zeros(2), torch.ones(2))
    rebuilt = unflatten(*flatten(point))
    assert rebuilt.x is point.x
    assert rebuilt.y is point.y


@pytest.mark.parametrize("cls", [object, int, type("Plain", (), {})], ids=lambda cls: cls.__name__)
def test_a_class_without_fields_is_refused(cls):
    """The message names the class and the call that takes functions written by hand."""
    with pytest.raises(InvalidRegistrationError) as caught:
        functions_of(cls)
    assert f"{cls.__qualname__} is neither a dataclass nor has keys() and values()" in str(caught.value)
    assert f"\n    register_class_flattening({cls.__qualname__}, f_flatten," in str(caught.value)


def test_an_instance_is_refused():
    """The message asks whether its class was meant."""
    with pytest.raises(InvalidRegistrationError, match=r"Did you mean type\(obj\), the class Point\?"):
        functions_of(Point(1))


def test_a_model_output_comes_apart_by_the_fields_that_are_set():
    """A `ModelOutput` lists only what is not `None`, and comes back as what it was."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    flatten, flatten_with_keys, unflatten = functions_of(outputs.BaseModelOutput)
    hidden, states = torch.zeros(1), (torch.ones(1),)
    output = outputs.BaseModelOutput(last_hidden_state=hidden, hidden_states=states)
    children, static = flatten(output)
    assert children[0] is hidden
    assert (len(children), static) == (2, ["last_hidden_state", "hidden_states"])
    assert [str(key) for key, _ in flatten_with_keys(output)[0]] == ["['last_hidden_state']", "['hidden_states']"]
    rebuilt = unflatten(children, static)
    assert (type(rebuilt), list(rebuilt.keys()), rebuilt.attentions) == (outputs.BaseModelOutput, static, None)
