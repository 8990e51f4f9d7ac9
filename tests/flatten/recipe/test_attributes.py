"""The functions made of names of attributes read and set each attribute once, and nothing else."""

from collections import OrderedDict

import pytest
import torch
import torch.utils._pytree as pytree

from yobx_flatten.errors import InvalidRegistrationError, RoundTripError, StaticDataError, UnsetFieldError
from yobx_flatten.recipe.attributes import checked, functions_from_fields


class Cell:
    def __init__(self, hidden, state, size=3):
        self.hidden, self.state, self.size = hidden, state, size


class Pair:
    def __init__(self, hidden, state):
        self.hidden, self.state = hidden, state


class Sized:
    def __init__(self, size=3):
        self.size = size


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a, b):
        self.a, self.b = a, b


class Guarded:
    def __init__(self):
        raise TypeError("use Guarded.make")

    def __new__(cls):
        raise TypeError("use Guarded.make")

    def __setattr__(self, name, value):
        raise AttributeError(f"{name} is read-only")

    @classmethod
    def make(cls, a, b):
        guarded = object.__new__(cls)
        vars(guarded).update(a=a, b=b)
        return guarded


def test_children_and_static_data_are_told_apart():
    flatten, flatten_with_keys, unflatten = functions_from_fields(Cell, ["hidden", "state"], ["size"])
    assert flatten(Cell(1, 2)) == ([1, 2], [["hidden", "state"], [3]])
    assert flatten_with_keys(Cell(1, 2)) == (
        [(pytree.GetAttrKey("hidden"), 1), (pytree.GetAttrKey("state"), 2)],
        [["hidden", "state"], [3]],
    )
    assert vars(unflatten([4, 5], [["hidden", "state"], [6]])) == {"hidden": 4, "state": 5, "size": 6}


def test_the_static_part_may_do_without_the_names_and_a_class_without_children():
    flatten, _, unflatten = functions_from_fields(Cell, ["hidden", "state"], ["size"], names_in_static=False)
    assert flatten(Cell(1, 2)) == ([1, 2], (3,))
    assert vars(unflatten([4, 5], (6,))) == {"hidden": 4, "state": 5, "size": 6}
    assert functions_from_fields(Pair, ["hidden", "state"], names_in_static=False)[0](Pair(1, 2)) == ([1, 2], None)
    flatten, _, unflatten = functions_from_fields(Sized, [], ["size"])
    assert flatten(Sized()) == ([], [[], [3]])
    assert vars(unflatten([], [[], [7]])) == {"size": 7}
    with pytest.raises(ValueError, match=r"is (shorter|longer) than"):
        unflatten([1], [[], [7]])


def test_an_object_is_rebuilt_without_code_of_its_class():
    obj = Guarded.make(1, 2)
    flatten, _, unflatten = functions_from_fields(Guarded, ["a", "b"])
    rebuilt = unflatten(*flatten(obj))
    assert (type(rebuilt), rebuilt.a, rebuilt.b) == (Guarded, 1, 2)


class Reads:
    def __init__(self, hidden):
        self._hidden = hidden

    hidden = property(lambda self: self._hidden)


@pytest.mark.parametrize(
    ("cls", "names", "static", "said"),
    [
        # the message quotes the name, which would end in the source
        *((Cell, ["hidden", name], [], f"{name!r} is not the name of") for name in ["a b", "class", "", "a.b", "0"]),
        (Cell, ["size"], ["size"], "'size' of .*Cell is given twice"),
        (Slotted, ["a"], ["b", "c"], "Slotted has no slot 'c'"),
        (Reads, ["hidden"], [], "'hidden' is a property without a setter"),
        (Reads, [], ["hidden"], "'hidden' is a property without a setter"),
    ],
)
def test_what_cannot_be_set_as_an_attribute_is_refused(cls, names, static, said):
    with pytest.raises(InvalidRegistrationError, match=said):
        functions_from_fields(cls, names, static)


def test_what_a_property_reads_is_flattened_and_set_again_and_a_text_is_one_name():
    flatten, _, unflatten = functions_from_fields(Reads, ["_hidden"])
    assert unflatten(*flatten(Reads(3))).hidden == 3
    assert functions_from_fields(Pair, "hidden", "state").flatten(Pair(1, "two")) == ([1], [["hidden"], ["two"]])


@pytest.mark.parametrize("value", [["a"], {"a": [1]}, ([1], 2), {1, 2}, OrderedDict(a=[1])], ids=repr)
def test_static_data_that_changes_is_copied(value):
    """Who appends to a list of his own does not change a program that was exported with it."""
    copied = checked(value, "Cell.size")
    assert type(copied) is type(value)
    assert copied == value
    assert copied is not value
    inner = copied["a"] if isinstance(copied, dict) else copied[0] if isinstance(copied, tuple) else copied
    inner.clear()
    assert value in (["a"], {"a": [1]}, ([1], 2), {1, 2})


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (torch.zeros(1), r"the Tensor tensor\(\[0.\]\) at Cell.size,"),
        ({"a": [torch.zeros(1)]}, r"the Tensor tensor\(\[0.\]\) at Cell.size\['a'\]\[0\],"),
        (lambda: None, r"the function <function .* at Cell.size,"),
        (float("nan") * -1, r"the float nan at Cell.size, which is not equal to itself"),
    ],
    ids=["tensor", "nested tensor", "lambda", "another NaN"],
)
def test_flatten_names_the_attribute_that_is_no_static_data(value, found):
    flatten, flatten_with_keys, _ = functions_from_fields(Cell, ["hidden", "state"], ["size"])
    for function in (flatten, flatten_with_keys):
        with pytest.raises(StaticDataError, match=found):
            function(Cell(1, 2, value))


def test_a_slot_that_was_never_set_is_named():
    """The error is one of ours, and still the AttributeError that Python raises; the line sets the slot."""
    flatten, flatten_with_keys, _ = functions_from_fields(Slotted, ["a"], ["b"])
    obj = object.__new__(Slotted)
    obj.a = 1
    for function in (flatten, flatten_with_keys):
        with pytest.raises(UnsetFieldError, match=r"Slotted\.b was never set(.|\n)*\n    self\.b = None") as caught:
            function(obj)
        assert isinstance(caught.value, AttributeError)


@pytest.mark.parametrize(
    ("children", "static"), [(["state"], ["hidden_"]), (["hidden_"], ["state"]), (["hidden_"], [])]
)
def test_a_misspelt_attribute_is_named_and_the_line_of_the_message_registers_the_class(children, static):
    obj = Pair(1, "two")
    with pytest.raises((UnsetFieldError, RoundTripError)) as refused:
        functions_from_fields(Pair, children, static).flatten(obj)
    line = str(refused.value).splitlines()[-1].strip().removeprefix("register")
    made = eval(f"functions_from_fields{line.replace('children=', '').replace('static=', '')}")
    found = made.unflatten(*made.flatten(obj))
    assert (found.hidden, found.state) == (1, "two")


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("BaseModelOutput", "flatten_base_model_output"),
        ("_Private", "flatten__private"),
        ("Pair[int, str]", "flatten_pair_int_str_"),
        *((name, "flatten_") for name in ("A B", "x;y", "1st", "π-x", "class", "line\nbreak")),
    ],
)
def test_a_class_may_bear_any_name_and_a_function_is_named_after_it(name, function):
    cls = type(name, (Cell,), {})
    flatten, _, unflatten = functions_from_fields(cls, ["hidden", "state"], ["size"])
    assert vars(unflatten(*flatten(cls(1, 2)))) == {"hidden": 1, "state": 2, "size": 3}
    assert flatten.__name__.startswith(function)
