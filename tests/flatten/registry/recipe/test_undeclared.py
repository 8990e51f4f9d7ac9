"""`check_round_trip` passes what comes back as it went; an attribute that nothing declares is refused by name."""

import collections
import contextlib
import dataclasses
import functools
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st

from yobx_flatten import check_recipe, functions_from_fields, load_nested, save_nested
from yobx_flatten.declare import pytree_dataclass, register, register_class_flattening, unregister_class_flattening
from yobx_flatten.errors import InvalidRegistrationError, RoundTripError
from yobx_flatten.registry.claims import REGISTRY
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
        ({}, type("Child", (Bag,), {})([]), "Bag: f_check must return a Bag for a test, not a Child."),
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
            with pytest.raises(RoundTripError, match="Bag: torch's C\\+\\+ and Python pytree flatten it differently"):
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


@dataclasses.dataclass
class Declared(dict):
    x: Any = None
    size: int = dataclasses.field(default=1, metadata={"static": True})


@dataclasses.dataclass
class Mirrored(dict):
    x: Any
    y: Any = 5

    def __post_init__(self):
        for name in ("x", "y"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


@dataclasses.dataclass
class Rows(list):
    x: Any = None


class SlottedMapping(dict):
    __slots__ = ("a",)


class SlottedList(list):
    __slots__ = ("a",)

    def __iter__(self):
        raise AssertionError("its own business")

    def extend(self, items):
        raise AssertionError("its own business")


class Attributes(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Config(dict):
    def __init__(self, name):
        super().__init__(name=name)


Open = type("Open", (dict,), {})
Ordered = type("Ordered", (collections.OrderedDict,), {})
Count = type("Count", (collections.Counter,), {})
User = type("User", (collections.UserDict,), {})


@pytest.fixture
def registered():
    done = []

    def add(cls):
        register(cls, backends="torch")
        done.append(cls)
        return cls

    yield add
    for cls in done:
        unregister_class_flattening(cls)


def rebuilt(obj):
    return pytree.tree_unflatten(*pytree.tree_flatten(obj))


def test_a_dataclass_on_a_dict_comes_apart_by_fields_and_items(registered):
    x, item = torch.ones(2), torch.zeros(3)
    obj = registered(Declared)(x, size=4)
    obj["a b"] = item
    pairs, spec = pytree.tree_flatten_with_path(obj)
    assert [(pytree.keystr(path), leaf) for path, leaf in pairs] == [(".x", x), ("['a b']", item)]
    assert spec.context == [["x"], [4], ["a b"]]
    back = rebuilt(obj)
    assert (type(back), back.x is x, back.size, list(back.items())) == (Declared, True, 4, [("a b", item)])
    check_recipe(Declared, obj)


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_takes_fields_and_items(registered, strict):
    if strict and torch.__version__ < (2, 13):
        pytest.skip("dynamo of torch 2.11 reads no `__dict__` of a dict with fields")

    class Adds(torch.nn.Module):
        def forward(self, obj, rows):
            doubled = pytree.tree_map(lambda leaf: leaf * 2, obj)
            return obj.x + doubled["k"] + rows.x * rows[0]

    registered(Rows)
    obj, rows = registered(Declared)(torch.ones(2)), Rows(torch.full((2,), 3.0))
    obj["k"] = torch.full((2,), 5.0)
    rows.append(torch.full((2,), 7.0))
    program = torch.export.export(Adds(), (obj, rows), strict=strict)
    assert program.module()(obj, rows).tolist() == [32.0, 32.0]  # 1 + 2 * 5 + 3 * 7


def test_a_dataclass_whose_items_are_its_fields_stays_as_it_was(registered):
    assert pytree.tree_flatten(registered(Mirrored)(1, 2))[1].context == ["x", "y"]
    assert rebuilt(Mirrored(1, None)).y is None
    assert rebuilt(Mirrored(None, 2)) == Mirrored(None, 2)
    obj = Mirrored(1, 2)
    obj["y"] = 3  # a field that is no item any more would be lost
    with pytest.raises(RoundTripError, match=r"Mirrored: its attribute 'y' would be lost"):
        pytree.tree_leaves(obj)


def test_attributes_beside_the_items_are_refused_with_the_line_that_takes_them(registered):
    """Dropped in silence, they would be missing in every program and file; the line of the message keeps them."""
    obj = registered(Open)(a=torch.ones(1))
    obj.b = torch.zeros(2)
    with pytest.raises(RoundTripError, match="its attribute 'b' would be lost") as caught:
        pytree.tree_leaves(obj)
    assert "register(Open, children=['b'])" in str(caught.value)
    unregister_class_flattening(Open)
    flatten, keyed, unflatten = functions_from_fields(Open, ["b"])
    register_class_flattening(Open, flatten, unflatten, keyed)
    back = rebuilt(obj)
    assert (back.b is obj.b, back["a"] is obj["a"]) == (True, True)
    obj = registered(User)(a=1)  # which holds its items in an attribute
    assert rebuilt(obj) == User(a=1)
    obj.more = 2
    with pytest.raises(RoundTripError, match="its attribute 'more' would be lost"):
        pytree.tree_leaves(obj)


@pytest.mark.parametrize("cls", [SlottedMapping, SlottedList])
def test_slots_beside_the_items_are_children(registered, cls):
    items = {"k": 2} if cls is SlottedMapping else [2]
    obj = registered(cls)(items)
    obj.a = 1
    leaves, spec = pytree.tree_flatten(obj)
    assert leaves == [1, 2]
    back = pytree.tree_unflatten([3, 4], spec)
    kept = dict.copy(back) if cls is SlottedMapping else list.copy(back)
    assert (type(back), back.a, kept) == (cls, 3, {"k": 4} if cls is SlottedMapping else [4])


def test_an_ordered_dict_keeps_its_order_and_a_counter_is_not_counted_again(registered):
    obj = registered(Ordered)(b=1, a=2)
    assert list(rebuilt(obj).items()) == [("b", 1), ("a", 2)]
    flatten, _, unflatten = functions_from_fields(Ordered, ["x"])
    obj.x = 3
    assert (list(unflatten(*flatten(obj)).items()), unflatten(*flatten(obj)).x) == ([("b", 1), ("a", 2)], 3)
    assert rebuilt(registered(Count)("aab")) == {"a": 2, "b": 1}  # its constructor is given a dict, not pairs
    obj = registered(Attributes)(b=torch.ones(1))  # whose attributes are its items
    assert (rebuilt(obj).b is obj["b"], rebuilt(obj)["b"] is obj["b"]) == (True, True)


def test_keys_stand_in_a_tuple_where_the_static_part_has_no_names():
    """So that it hashes, as JAX wants it."""
    flatten, _, unflatten = functions_from_fields(Declared, ["x"], ["size"], names_in_static=False)
    obj = Declared(1, 2)
    obj["k"] = 3
    children, static = flatten(obj)
    assert (children, static, hash(static)) == ([1, 3], (2, ("k",)), hash((2, ("k",))))
    back = unflatten(children, static)
    assert (back.x, back.size, dict(back)) == (1, 2, {"k": 3})


def test_a_constructor_that_makes_other_items_is_refused(registered):
    """Otherwise the rebuilt object holds the dict of all items where a tensor was; the line of the message works."""
    obj = registered(Config)(torch.ones(2))
    with pytest.raises(RoundTripError, match=r"the instance has {'name': dict}"):
        rebuilt(obj)
    flatten, _, unflatten = functions_from_fields(Config, [])
    assert unflatten(*flatten(obj))["name"] is obj["name"]


@pytest.mark.parametrize(
    "cls",
    [
        type("Default", (collections.defaultdict,), {}),
        dataclasses.make_dataclass("Failure", ["x"], bases=(Exception,)),
        dataclasses.make_dataclass("Text", ["x"], bases=(str,)),
        dataclasses.make_dataclass("Queue", ["x"], bases=(collections.deque,)),
    ],
    ids=lambda cls: cls.__name__,
)
def test_a_class_whose_base_holds_more_is_refused(cls):
    with pytest.raises(InvalidRegistrationError, match="stores its content outside of attributes"):
        functions_of(cls)
    with pytest.raises(InvalidRegistrationError, match="stores its content outside of attributes"):
        functions_from_fields(cls, ["x"])


def rebuild(cls, base, fields, items):
    obj = base.__new__(cls, items) if base is tuple else base.__new__(cls)
    for number, item in enumerate(items):
        if issubclass(base, dict):
            base.__setitem__(obj, (number, "k"), item)
        elif base is list:
            base.append(obj, item)
    for name, value in fields.items():
        object.__setattr__(obj, name, value)
    return obj


def content(obj, base, names):
    items = list(base.items(obj)) if issubclass(base, dict) else list(base.__iter__(obj)) if base is not object else []
    plain = [*[getattr(obj, name) for name in names], *items]
    return [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in pytree.tree_leaves(plain)]


@settings(max_examples=60, deadline=None)
@given(
    base=st.sampled_from([object, dict, collections.OrderedDict, list, tuple]),
    frozen=st.booleans(),
    slots=st.booleans(),
    statics=st.lists(st.booleans(), max_size=4),
    count=st.integers(0, 3),
    by=st.sampled_from([register, pytree_dataclass]),
)
def test_fields_and_items_come_back(tmp_path_factory, base, frozen, slots, statics, count, by):
    slots = slots and base is not tuple  # Python has no slots beside the items of a tuple
    fields = {f"f{i}": f"s{i}" if static else torch.full((i + 1,), float(i)) for i, static in enumerate(statics)}
    declared = [
        (name, Any, dataclasses.field(default=None, metadata={"static": isinstance(value, str)}))
        for name, value in fields.items()
    ]
    bases = () if base is object else (base,)
    cls = dataclasses.make_dataclass("Made", declared, bases=bases, frozen=frozen, slots=slots, eq=False)
    items = [torch.zeros(i + 1) for i in range(count if bases else 0)]
    obj = rebuild(cls, base, fields, items)
    by(cls, backends="torch")
    try:
        check_recipe(cls, obj)
        leaves, spec = pytree.tree_flatten(obj)
        expected = [*[value for value in fields.values() if not isinstance(value, str)], *items]
        assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in expected]
        path = tmp_path_factory.mktemp("made") / "x.onnx"
        save_nested(path, obj)
        for rebuilt in (pytree.tree_unflatten(leaves, spec), load_nested(path)):
            assert type(rebuilt) is cls
            assert content(rebuilt, base, fields) == content(obj, base, fields)
        keys = [pytree.keystr(key) for key, _ in pytree.tree_flatten_with_path(obj)[0]]
        assert len(set(keys)) == len(leaves)
    finally:
        unregister_class_flattening(cls)
