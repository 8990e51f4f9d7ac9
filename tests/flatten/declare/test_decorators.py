"""A node written the way JAX does is a node of torch: in Python, in C++, in a program, in a file."""

import dataclasses
import enum
from typing import Any, NamedTuple, TypedDict

import pytest
import torch
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree

from tests import fresh_process
from tests.flatten.nodes import Dense, DenseParams, FieldState, FixedShape, Keyed, LinearParams, MyState, TrainState
from tests.flatten.pair import Pair
from tests.modules import module_class
from yobx_flatten import export_program, functions_from_fields, make_flattening_function_for_dataclass, mirror, register
from yobx_flatten.declare import (
    pytree_dataclass,
    register_class_flattening,
    register_pytree_node,
    register_pytree_node_class,
    register_pytree_with_keys,
    register_pytree_with_keys_class,
    static_field,
    unregister_class_flattening,
)
from yobx_flatten.errors import (
    AlreadyRegisteredError,
    InvalidArgumentError,
    InvalidRegistrationError,
    NotRegisteredError,
)


def flatten(pair):
    return (pair.a, pair.b), None


def unflatten(aux, children):
    return Pair(*children)


@pytest.fixture
def pair_forgotten():
    yield
    unregister_class_flattening(Pair)


def paths(tree):
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]


@pytest.mark.parametrize("cls", [DenseParams, Dense])
def test_functional_transforms_of_torch_pass_through(cls):
    layer = cls(torch.ones(5, 3), torch.zeros(5), activation="gelu")
    grads = torch.func.grad(lambda dense: (dense.weights**2).sum() + dense.bias.sum())(layer)
    assert grads.weights.tolist() == [[2.0] * 3] * 5
    assert grads.activation == "gelu"
    doubled = torch.func.vmap(lambda dense: pytree.tree_map(lambda leaf: 2 * leaf, dense))(layer)
    assert type(doubled) is cls
    assert doubled.weights.tolist() == [[2.0] * 3] * 5


@pytest.mark.parametrize(
    "obj",
    [
        TrainState({"w": 1}, {"m": 2}, 3),
        FixedShape(1, (2,)),
        MyState(1, 2),
        LinearParams(1, 2),
        DenseParams(1, 2),
        FieldState({"w": 1}, {}, 3),
        Dense(1, 2),
        Keyed(1, 2),
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_every_table_of_torch_takes_it_apart_alike(obj):
    leaves, spec = pytree.tree_flatten(obj)
    rebuilt = pytree.tree_unflatten(leaves, spec)
    assert type(rebuilt) is type(obj)
    assert pytree.tree_flatten(rebuilt) == (leaves, spec)
    cxx_pytree = pytest.importorskip("torch.utils._cxx_pytree", reason="optree is not installed", exc_type=ImportError)
    assert cxx_pytree.tree_leaves(obj) == leaves
    assert fx_pytree.tree_flatten_spec(obj, spec) == leaves
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_paths_name_fields_and_keys():
    assert paths([Dense(1, 2), Keyed(3, 4), LinearParams(5, 6)]) == [
        "[0].weights", "[0].bias", "[1]['first']", "[1]['second']", "[2][0]", "[2][1]",
    ]  # fmt: skip


class Step(torch.nn.Module):
    def forward(self, dense, state):
        hidden = torch.nn.functional.relu(state.params["x"] @ dense.weights + dense.bias)
        return {"dense": dense, "state": TrainState({"x": hidden}, state.opt_state, state.step)}


def example():
    return Dense(torch.randn(3, 3), torch.zeros(3)), TrainState({"x": torch.randn(2, 3)}, {}, torch.tensor(1))


LOADING = """
import sys
import torch
import tests.flatten.nodes as nodes

assert not {"jax", "optree"} & set(sys.modules)
program = torch.export.load(sys.argv[1])
dense = nodes.Dense(torch.eye(3), torch.tensor([0.0, 1.0, -9.0]))
x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
out = program.module()(dense, nodes.TrainState({"x": x}, {}, torch.tensor(7)))
assert type(out["dense"]) is nodes.Dense and out["dense"].activation == "relu"
assert type(out["state"]) is nodes.TrainState and out["state"].step.item() == 7
assert out["state"].params["x"].tolist() == [[1.0, 3.0, 0.0], [4.0, 6.0, 0.0]]
"""


def test_a_saved_program_is_loaded_by_a_process_that_imports_the_module(tmp_path):
    program = torch.export.export(Step(), example())
    torch.export.save(program, tmp_path / "program.pt2")
    fresh_process.run("-c", LOADING, tmp_path / "program.pt2")


def test_a_program_refuses_other_static_data():
    program = torch.export.export(Step(), example())
    dense, state = example()
    with pytest.raises((ValueError, RuntimeError), match=r"relu[\s\S]*gelu"):
        program.module()(dataclasses.replace(dense, activation="gelu"), state)


def test_compiled_code_looks_through_flatten_and_unflatten():

    @torch.compile(backend="eager", fullgraph=True)
    def double(tree):
        leaves, spec = pytree.tree_flatten(tree)
        return pytree.tree_unflatten([2 * leaf for leaf in leaves], spec)

    tree = Dense(torch.ones(2), torch.ones(1)), DenseParams(torch.ones(2), torch.ones(1), "gelu")
    fields, functions = double(tree)
    assert (fields.weights.tolist(), fields.activation) == ([2.0, 2.0], "relu")
    assert (functions.weights.tolist(), functions.activation) == ([2.0, 2.0], "gelu")


def test_the_set_collects_the_classes_that_were_given_functions():
    supported: set[type] = set()
    make_flattening_function_for_dataclass(Dense, supported)
    with pytest.raises(InvalidRegistrationError, match="Pair does not declare its fields"):
        make_flattening_function_for_dataclass(Pair, supported)
    assert supported == {Dense}


@pytest.fixture
def local():
    made: list[type] = []
    yield lambda cls: made.append(cls) or cls
    for cls in made:
        unregister_class_flattening(cls)


def test_options_of_a_dataclass_and_of_a_static_field_are_passed_on_and_one_can_be_decorated_again(local):

    @local
    @pytree_dataclass(frozen=True, slots=True, kw_only=True)
    class Point:
        x: Any
        names: list = static_field(default_factory=lambda: ["a"], metadata={"unit": "m"})
        y: Any = 2

    rebuilt = pytree.tree_map(lambda leaf: leaf * 10, Point(x=1))
    assert rebuilt == Point(x=10, y=20, names=["a"])
    assert not hasattr(rebuilt, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        rebuilt.x = 0
    assert dataclasses.fields(Point)[1].metadata == {"unit": "m", "static": True}
    point = local(pytree_dataclass(dataclasses.make_dataclass("Point", ["x"], frozen=True)))(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        pytree.tree_map(lambda leaf: leaf, point).x = 0


def test_a_subclass_is_a_leaf_until_it_is_decorated(local):

    @local
    @pytree_dataclass
    class Base:
        x: Any
        kind: str = static_field(default="base")

    class Undecorated(Base):
        pass

    obj = Undecorated(1)
    assert pytree.tree_leaves(obj) == [obj]

    @local
    @pytree_dataclass
    class Sub(Base):
        y: Any = None

    rebuilt = pytree.tree_map(lambda leaf: leaf * 2, Sub(1, "sub", 2))
    assert (type(rebuilt), rebuilt.x, rebuilt.y, rebuilt.kind) == (Sub, 2, 4, "sub")
    assert paths(Sub(1, "sub", 2)) == [".x", ".y"]
    assert type(pytree.tree_map(lambda leaf: leaf, Base(1))) is Base


def test_an_undecorated_subclass_inside_an_export_is_named_with_its_line(local):

    class Sub(TrainState):
        pass

    module = module_class("Module", lambda self, state: state.params["w"])()
    with pytest.raises(NotRegisteredError, match=r"register_pytree_node_class\(.*Sub\)") as caught:
        export_program(module, (Sub({"w": torch.ones(2)}, {}, 1),))
    assert "(TrainState is registered, which does not count for its subclasses)" in str(caught.value)


def test_the_same_functions_again_change_nothing_and_others_are_refused(pair_forgotten):
    assert register_pytree_node(Pair, flatten, unflatten) is True
    assert register_pytree_node(Pair, flatten, unflatten) is False
    with pytest.raises(AlreadyRegisteredError, match=r"unregister_class_flattening\(Pair\)"):
        register_pytree_node(Pair, lambda pair: ((pair.a,), pair.b), lambda b, a: Pair(*a, b))
    assert pytree.tree_leaves(Pair(1, 2)) == [1, 2]


def test_a_class_is_told_to_the_chosen_libraries_only():
    optree = pytest.importorskip("optree", reason="optree is not installed")
    register_pytree_node(Pair, flatten, unflatten, backends=("torch",))
    pair = Pair(1, 2)
    assert (pytree.tree_leaves(pair), optree.tree_leaves(pair, namespace="yobx_flatten")) == ([1, 2], [pair])
    assert register_pytree_node(Pair, flatten, unflatten, backends="optree") is True  # one more library
    assert optree.tree_leaves(pair, namespace="yobx_flatten") == [1, 2]
    unregister_class_flattening(Pair)
    assert (pytree.tree_leaves(pair), optree.tree_leaves(pair, namespace="yobx_flatten")) == ([pair], [pair])


@pytest.mark.parametrize("decorator", [register_pytree_node_class, register_pytree_with_keys_class])
def test_a_decorator_tells_a_class_with_methods_to_the_chosen_libraries_only(decorator, local):
    optree = pytest.importorskip("optree", reason="optree is not installed")

    @local
    @decorator(backends="optree")
    class Cell:
        def __init__(self, x, y):
            self.x, self.y = x, y

        def tree_flatten(self):
            return (self.x, self.y), None

        def tree_flatten_with_keys(self):
            return ((("x", self.x), (1, self.y)), None)

        @classmethod
        def tree_unflatten(cls, static, children):
            return cls(*children)

    cell = Cell(1, 2)
    assert (pytree.tree_leaves(cell), optree.tree_leaves(cell, namespace="yobx_flatten")) == ([cell], [1, 2])
    unregister_class_flattening(Cell)
    assert (paths(decorator(Cell)(3, 4)), pytree.tree_leaves(cell)) == (["['x']", "[1]"], [1, 2])


class Forgot:
    def tree_flatten(self):
        return (), None

    def tree_unflatten(self, aux, children):
        return self


class Batch(TypedDict):
    x: Any


@pytest.mark.parametrize(
    ("register_it", "message"),
    [
        (lambda: register_pytree_node(Pair(1, 2), flatten, unflatten), "expected a class as first argument"),
        (lambda: register_pytree_node(Pair, None, unflatten), r"flatten must be a function f\(obj\), found None"),
        (lambda: register_pytree_node(Pair, flatten, lambda c: c), r"unflatten is called as f\(static, children\)"),
        (
            lambda: register_pytree_node(Pair, flatten, lambda children, context: Pair(*children)),
            "the order of JAX, but its first parameter is 'children'",
        ),
        (lambda: register_pytree_with_keys(Pair, None, unflatten), "flatten_with_keys must be a function"),
        (lambda: register_pytree_node_class(Pair), "the class has no method tree_flatten"),
        (lambda: register_pytree_with_keys_class(Pair), "the class has no method tree_flatten_with_keys"),
        (lambda: register(Pair), "does not declare its fields"),
        (lambda: pytree_dataclass(3), "pytree_dataclass: expected a class"),
        (lambda: mirror(Pair(1, 2)), "Did you mean type"),
        (lambda: functions_from_fields(Pair(1, 2), ["a"]), r"Did you mean type\(obj\), the class Pair\?"),
        (
            lambda: make_flattening_function_for_dataclass(Pair(1, 2), set()),
            "make_flattening_function_for_dataclass: expected a class",
        ),
        (
            lambda: register_pytree_node_class(Forgot),
            "tree_unflatten creates the object, so it must be a class",  # it would be called without an object
        ),
        (lambda: register(Batch), "Batch is a TypedDict, whose instances are plain dicts"),
    ],
)
def test_bad_input_is_refused_by_name(register_it, message):
    with pytest.raises(InvalidRegistrationError, match=message):
        register_it()
    assert len(pytree.tree_leaves(Pair(1, 2))) == 1


def test_a_builtin_without_a_signature_can_unflatten():
    """The order of its arguments cannot be read, so it is taken as it is: `max((), (2, 4))` is `(2, 4)`."""
    register_pytree_node(Pair, lambda pair: ((pair.a, pair.b), ()), max)
    try:
        assert pytree.tree_map(lambda x: 2 * x, Pair(1, 2)) == (2, 4)
    finally:
        unregister_class_flattening(Pair)


@pytest.mark.parametrize("backends", ["numpy", ("torch", "numpy"), ()])
def test_an_unknown_library_is_refused_with_those_that_are_known(backends):
    with pytest.raises(InvalidArgumentError, match="'all' or name libraries among 'torch', 'optree', 'jax'") as caught:
        register_class_flattening(Pair, flatten, lambda c, s: Pair(*c), None, backends=backends)
    assert "\n    register_class_flattening(..., backends=('torch',))" in str(caught.value)
    with pytest.raises(InvalidArgumentError, match="pytree_dataclass: backends= must be 'all'"):
        pytree_dataclass(type("Local", (), {}), backends=backends)


class Where(NamedTuple):
    x: Any
    y: Any


class Mode(enum.Enum):
    TRAIN = 1


_REGISTRATIONS = {
    "register": register,
    "register_pytree_node": lambda cls: register_pytree_node(cls, flatten, unflatten),
    "register_pytree_with_keys": lambda cls: register_pytree_with_keys(cls, flatten, unflatten),
    "register_pytree_node_class": register_pytree_node_class,
    "register_pytree_with_keys_class": register_pytree_with_keys_class,
    "pytree_dataclass": pytree_dataclass,
    "register_class_flattening": lambda cls: register_class_flattening(cls, list, lambda c, _: cls(*c), None),
    "make_flattening_function_for_dataclass": lambda cls: make_flattening_function_for_dataclass(cls, set()),
    "functions_from_fields": lambda cls: functions_from_fields(cls, []),
    "mirror": mirror,
}


@pytest.mark.parametrize("name", _REGISTRATIONS)
def test_a_named_tuple_and_an_enum_are_refused_by_every_registration(name):
    """torch would ignore the tuple, and JAX not; a member that is put together would not be the member."""
    said = f"{name}: .*Where is a named tuple, which torch, optree and JAX flatten without a registration"
    with pytest.raises(InvalidRegistrationError, match=said) as caught:
        _REGISTRATIONS[name](Where)
    assert "torch.utils._pytree._register_namedtuple(Where, serialized_type_name=" in str(caught.value)
    assert pytree.tree_leaves(Where(1, 2)) == [1, 2]
    assert (Where(1, 2), Where._fields) == ((1, 2), ("x", "y"))
    with pytest.raises(InvalidRegistrationError, match=r'mode: Mode = dataclasses.field\(metadata={"static": True}\)'):
        _REGISTRATIONS[name](Mode)


class Memory:
    def __init__(self, key, value, window):
        self.key, self.value, self.window = key, value, window


class SlottedMemory(Memory):
    __slots__ = ("key", "value", "window")


class MemoryOfItems(dict):
    def __init__(self, key, value, window):
        super().__init__(more=key)
        self.key, self.value, self.window = key, value, window


def _by_names(cls):
    return register(cls, children=["key", "value"], static=["window"])


def _by_functions(cls):
    return register_class_flattening(cls, functions_from_fields(cls, ["key", "value"], ["window"]))


@pytest.mark.parametrize("cls", [Memory, SlottedMemory, MemoryOfItems], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("way", [_by_names, _by_functions])
def test_one_line_registers_a_class_by_its_attributes(cls, way):
    obj = cls(torch.ones(2), torch.zeros(3), 4)
    keyed, static = functions_from_fields(cls, ["key", "value"], ["window"]).flatten_with_keys(obj)
    assert way(cls)
    found, spec = pytree.tree_flatten_with_path(obj)
    assert [path for path, _ in found] == [(key,) for key, _ in keyed]
    assert all(one is other for (_, one), (_, other) in zip(found, keyed, strict=True))
    assert spec.context == static
    back = pytree.tree_unflatten([leaf for _, leaf in found], spec)
    assert (type(back), back.key is obj.key, back.value is obj.value, back.window) == (cls, True, True, 4)
    unregister_class_flattening(cls)


def test_names_that_are_registered_twice_change_nothing():
    assert _by_names(Memory)
    assert not _by_names(Memory)
    with pytest.raises(AlreadyRegisteredError):
        register(Memory, children=["key"], static=["value", "window"])
    unregister_class_flattening(Memory)
    with pytest.raises(InvalidRegistrationError, match=r"register\(Memory, children=\[...\], static=\['window'\]\)"):
        register(Memory, static=["window"])
    functions = functions_from_fields(Memory, ["key", "value"], ["window"])
    with pytest.raises(InvalidRegistrationError, match=r"register_class_flattening\(Memory, functions\)"):
        register_class_flattening(Memory, functions, functions.unflatten)
