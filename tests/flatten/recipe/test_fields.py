"""Functions read off a class take its instances apart by their fields or keys, and put them together untouched."""

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
import torch.utils._pytree as pytree

from yobx_flatten import register, register_class_flattening, unregister_class_flattening
from yobx_flatten.errors import InvalidRegistrationError, StaticDataError
from yobx_flatten.recipe.fields import functions_of, recipe_of


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


@pytest.fixture
def attrs_classes():
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

    return [Defined(1, secret=2, size="3"), Frozen(1, 2, 3)]


def test_an_attrs_class_comes_apart_by_its_attributes(attrs_classes):
    for obj in attrs_classes:
        flatten, _, unflatten = functions_of(type(obj))
        children, static = flatten(obj)
        assert static == [["x", "_hidden", "made"], [3]]
        assert children == [1, 2, obj.made]
        assert unflatten(children, static) == obj
        assert unflatten(["placeholder", 2, None], static).x == "placeholder"


@pytest.fixture
def pydantic():
    return pytest.importorskip("pydantic", reason="pydantic writes the models")


def test_a_pydantic_model_comes_back_with_all_it_holds(pydantic):

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


def test_a_pydantic_model_is_rebuilt_without_validation(pydantic):
    """Placeholders of a trace are no integers."""

    class Model(pydantic.BaseModel):
        x: int

    flatten, _, unflatten = functions_of(Model)
    model = Model(x=1)
    rebuilt = unflatten(*flatten(model))
    assert rebuilt == model
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
