"""Functions read off a class, or made of names, take its instances apart and put them together untouched."""

import dataclasses
from collections import OrderedDict
from typing import Any, ClassVar

import pytest
import torch
import torch.utils._pytree as pytree

from yobx_flatten import register, register_class_flattening, unregister_class_flattening
from yobx_flatten.errors import InvalidRegistrationError, RoundTripError, StaticDataError, UnsetFieldError
from yobx_flatten.registry.recipe.attributes import checked, functions_from_fields
from yobx_flatten.registry.recipe.fields import functions_of, recipe_of


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
class Checked:
    x: Any
    double: Any = dataclasses.field(init=False)

    def __post_init__(self):
        if not isinstance(self.x, int):
            raise TypeError("x must be an integer")
        self.double = 2 * self.x


class State(dict):
    pass


@dataclasses.dataclass
class Odd:
    seed: dataclasses.InitVar[int]
    x: Any = dataclasses.field(kw_only=True)
    made: Any = dataclasses.field(init=False, default=None)
    listed: list = dataclasses.field(default_factory=list, repr=False, compare=False)
    size: int = dataclasses.field(default=1, kw_only=True, metadata={"static": True})
    shared: ClassVar[int] = 5

    def __post_init__(self, seed):
        self.made = seed


@dataclasses.dataclass
class Child(Point):
    z: Any = None
    x: Any = dataclasses.field(default=0, metadata={"static": True})


class Slots:
    __slots__ = ("__hidden", "__weakref__", "a")

    def __init__(self, a, hidden):
        self.a, self.__hidden = a, hidden

    @property
    def hidden(self):
        return self.__hidden


class MoreSlots(Slots):
    __slots__ = "b"


class ForJax:
    def __init__(self, data, shape):
        self.data, self.shape = data, shape

    def tree_flatten(self):
        return (self.data,), self.shape

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, static)


def test_a_dict_subclass_comes_apart_by_its_keys():
    flatten, flatten_with_keys, unflatten = functions_of(State)
    state = State(b=1, a=2)
    assert flatten(state) == ([1, 2], ["b", "a"])
    assert flatten_with_keys(state) == ([(pytree.MappingKey("b"), 1), (pytree.MappingKey("a"), 2)], ["b", "a"])
    rebuilt = unflatten([3, 4], ["b", "a"])
    assert (type(rebuilt), list(rebuilt.items())) == (State, [("b", 3), ("a", 4)])
    state = State({0: "a", (1, 2): "b"})
    assert unflatten(*flatten(state)) == state


def test_a_dataclass_comes_apart_by_its_fields_and_is_rebuilt_without_its_constructor():
    """`__post_init__` may refuse the placeholders of a trace, or compute anew what is there: it is not asked."""
    flatten, flatten_with_keys, unflatten = functions_of(Point)
    assert flatten(Point(1)) == ([1, None], ["x", "y"])
    assert flatten_with_keys(Point(1, 2)) == ([(pytree.GetAttrKey("x"), 1), (pytree.GetAttrKey("y"), 2)], ["x", "y"])
    assert unflatten((value for value in (3, 4)), ["x", "y"]) == Point(3, 4)
    assert recipe_of(Point).name == f"yobx_flatten:{__name__}.Point"
    flatten, _, unflatten = functions_of(Checked)
    assert flatten(Checked(2)) == ([2, 4], ["x", "double"])
    rebuilt = unflatten(["placeholder", 9], ["x", "double"])
    assert (rebuilt.x, rebuilt.double) == ("placeholder", 9)


@pytest.mark.parametrize("cls", [Point, State])
@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_children_is_refused(cls, count):
    _, _, unflatten = functions_of(cls)
    with pytest.raises(ValueError, match=r"zip|values to unpack"):
        unflatten(list(range(count)), ["x", "y"])


def test_every_way_to_write_a_field_comes_back():
    flatten, _, unflatten = functions_of(Odd)
    odd = Odd(7, x=1, size=4)
    assert flatten(odd) == ([1, 7, []], [["x", "made", "listed"], [4]])
    assert vars(unflatten(*flatten(odd))) == {"x": 1, "made": 7, "listed": [], "size": 4}
    flatten, _, unflatten = functions_of(Child)  # brings the fields of its base
    assert flatten(Child(x=1, y=2, z=3)) == ([2, 3], [["y", "z"], [1]])
    assert unflatten([2, 3], [["y", "z"], [1]]) == Child(x=1, y=2, z=3)


def test_a_class_of_slots_comes_apart_by_them_and_one_with_a_dict_is_refused():
    flatten, flatten_with_keys, unflatten = functions_of(MoreSlots)
    obj = MoreSlots("a", "hidden")
    obj.b = "b"
    names = ["_Slots__hidden", "a", "b"]
    assert flatten(obj) == (["hidden", "a", "b"], names)
    assert [key.name for key, _ in flatten_with_keys(obj)[0]] == names
    rebuilt = unflatten(*flatten(obj))
    assert (type(rebuilt), rebuilt.a, rebuilt.hidden, rebuilt.b) == (MoreSlots, "a", "hidden", "b")
    with pytest.raises(InvalidRegistrationError, match="only __slots__"):
        functions_of(type("Open", (Slots,), {}))


def test_a_class_written_for_jax_comes_apart_by_its_methods():
    flatten, flatten_with_keys, unflatten = functions_of(ForJax)
    assert flatten(ForJax(1, (2, 3))) == ([1], (2, 3))
    assert flatten_with_keys(ForJax(1, (2, 3))) == ([(pytree.SequenceKey(0), 1)], (2, 3))
    assert vars(unflatten([5], (2, 3))) == {"data": 5, "shape": (2, 3)}


@pytest.mark.parametrize("cls", [object, type("Plain", (), {})], ids=lambda cls: cls.__name__)
def test_a_class_without_fields_is_refused(cls):
    with pytest.raises(InvalidRegistrationError) as caught:
        functions_of(cls)
    assert f"{cls.__qualname__} does not declare its fields" in str(caught.value)
    assert f"\n    register({cls.__qualname__}, children=['x', 'y'], static=['name'])" in str(caught.value)
    with pytest.raises(InvalidRegistrationError, match=r"Parameter is always a leaf and cannot be registered\."):
        functions_of(torch.nn.Parameter)


def test_an_attrs_class_comes_apart_by_its_attributes():
    attrs = pytest.importorskip("attrs", reason="attrs writes the classes")

    @attrs.define
    class Defined:
        x: Any
        _hidden: Any = attrs.field(alias="secret", default=None)
        size: int = attrs.field(default=1, metadata={"static": True}, converter=int)
        made: Any = attrs.field(init=False, factory=list)

    @attrs.frozen(slots=False)
    class Frozen:
        x: Any
        _hidden: Any
        size: int = attrs.field(default=1, metadata={"static": True})
        made: Any = None

        def __attrs_post_init__(self):
            if not isinstance(self.x, int):
                raise TypeError("x must be an integer")

    for obj in (Defined(1, secret=2, size="3"), Frozen(1, 2, 3)):
        flatten, _, unflatten = functions_of(type(obj))
        children, static = flatten(obj)
        assert static == [["x", "_hidden", "made"], [3]]
        assert children == [1, 2, obj.made]
        assert unflatten(children, static) == obj
        assert unflatten(["placeholder", 2, None], static).x == "placeholder"


def test_a_pydantic_model_comes_back_with_all_it_holds():
    pydantic = pytest.importorskip("pydantic", reason="pydantic writes the models")

    class Model(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, extra="allow", frozen=True)
        x: torch.Tensor
        y: Any = None
        size: int = pydantic.Field(3, json_schema_extra={"static": True})
        _seen: Any = pydantic.PrivateAttr(default=0)

    flatten, flatten_with_keys, unflatten = functions_of(Model)
    model = Model(x=torch.zeros(2), other=torch.ones(1))
    model._seen = 5
    children, static = flatten(model)
    assert (children[0] is model.x, children[1:]) == (True, [None, torch.ones(1), 5])
    assert [key.name for key, _ in flatten_with_keys(model)[0]] == ["x", "y", "other", "_seen"]
    assert static == {
        "names": ["x", "y"],
        "static": [3],
        "set": ["other", "x"],
        "extra": ["other"],
        "private": ["_seen"],
    }
    rebuilt = unflatten(children, static)
    assert (type(rebuilt), rebuilt.size, rebuilt._seen, rebuilt.other.item()) == (Model, 3, 5, 1)
    assert rebuilt.model_fields_set == {"x", "other"}
    assert rebuilt.x is model.x


def test_a_pydantic_model_is_rebuilt_without_validation():
    """Placeholders of a trace are no integers."""
    pydantic = pytest.importorskip("pydantic", reason="pydantic writes the models")

    class Model(pydantic.BaseModel):
        x: int

    flatten, _, unflatten = functions_of(Model)
    model = Model(x=1)
    assert unflatten(*flatten(model)) == model
    assert unflatten(["placeholder"], flatten(model)[1]).x == "placeholder"

    class Sized(pydantic.BaseModel):
        size: Any = pydantic.Field(json_schema_extra={"static": True})

    with pytest.raises(StaticDataError, match=r"the Tensor tensor\(\[1.\]\) at .*Sized.size,"):
        functions_of(Sized)[0](Sized(size=torch.ones(1)))
    root = pydantic.RootModel[list[int]]([1, 2])
    flatten, _, unflatten = functions_of(type(root))
    assert flatten(root)[0] == [[1, 2]]
    assert unflatten(*flatten(root)) == root


def objects_of_every_kind():
    attrs = pytest.importorskip("attrs", reason="attrs writes one class")
    pydantic = pytest.importorskip("pydantic", reason="pydantic writes one class")

    @attrs.frozen
    class Attrs:
        x: Any
        mode: str = attrs.field(default="fast", metadata={"static": True})

    class Model(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        x: Any
        mode: str = pydantic.Field("fast", json_schema_extra={"static": True})
        _seen: Any = pydantic.PrivateAttr(default=0.0)

    return [
        lambda x: Attrs(x),
        lambda x: Model(x=x),
        lambda x: Named(x, "fast"),
        lambda x: State(x=x),
        lambda x: type("Slotted", (Slots,), {"__slots__": ()})(x, None),
    ]


@pytest.mark.parametrize("number", range(5))
def test_functions_of_every_reader_pass_the_check_and_go_through_jax(number):
    make = objects_of_every_kind()[number]
    obj = make(torch.ones(2))
    flatten, flatten_with_keys, unflatten = functions_of(type(obj))
    assert register_class_flattening(type(obj), flatten, unflatten, flatten_with_keys, f_check=lambda: obj)
    unregister_class_flattening(type(obj))
    jax = pytest.importorskip("jax", reason="compiles the function")
    obj = make(2.0)
    register(type(obj))
    doubled = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree))(obj)
    unregister_class_flattening(type(obj))
    assert type(doubled) is type(obj)
    assert float(jax.tree.leaves(doubled)[0]) == 4


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
        (Cell, ["size"], ["size"], "attribute 'size' of .*Cell is given twice"),
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
