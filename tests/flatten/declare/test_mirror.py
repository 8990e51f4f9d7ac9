"""A class that one library knows comes apart in the others as it does there."""

import dataclasses
import textwrap
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from tests import fresh_process
from tests.flatten import other_libraries
from tests.transformers_versions import needs_transformers
from yobx_flatten import check_recipe, mirror, register, register_class_flattening, unregister_class_flattening
from yobx_flatten.errors import (
    AlreadyRegisteredError,
    InvalidArgumentError,
    MissingDependencyError,
    NotRegisteredError,
    RoundTripError,
)

jax = pytest.importorskip("jax", reason="mirrors JAX")
jnp = jax.numpy


class Pair:
    def __init__(self, a, b, name="pair"):
        self.a, self.b, self.name = a, b, name

    def __eq__(self, other):
        return vars(self) == vars(other)

    __hash__ = None


def pair_class():
    """A new class each time: JAX keeps every one that it was told of."""
    return type("Pair", (Pair,), {})


def with_jax(cls, keys=None):
    def flatten(obj):
        return (obj.a, obj.b), (obj.name, len(obj.name))

    def flatten_with_keys(obj):
        children, static = flatten(obj)
        return list(zip(keys, children, strict=True)), static

    def unflatten(static, children):
        return cls(*children, static[0])

    if keys is None:
        jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    else:
        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


@pytest.fixture
def mirrored():
    held = []

    def call(cls, **options):
        answer = mirror(cls, **options)
        held.append(cls)
        return answer

    yield call
    for cls in dict.fromkeys(held):
        unregister_class_flattening(cls)


@pytest.fixture(params=["flax", "equinox", "chex"])
def of_a_library(request):
    if request.param == "flax":
        struct = pytest.importorskip("flax.struct", reason="flax writes the class")

        @struct.dataclass
        class FlaxState:
            w: Any
            size: int = struct.field(pytree_node=False, default=3)

        return FlaxState({"x": torch.ones(2), "y": torch.zeros(1)})
    if request.param == "equinox":
        equinox = pytest.importorskip("equinox", reason="equinox writes the class")

        class EquinoxState(equinox.Module):
            w: Any
            size: int = equinox.field(static=True)

        return EquinoxState({"x": torch.ones(2), "y": torch.zeros(1)}, 3)
    chex = pytest.importorskip("chex", reason="chex writes the class")

    @chex.dataclass
    class ChexState:
        w: Any
        size: Any

    return ChexState(w={"x": torch.ones(2), "y": torch.zeros(1)}, size=torch.tensor(3))


@pytest.mark.parametrize("by", [mirror, register])
def test_a_class_of_a_jax_library_is_a_node_of_torch(by, of_a_library):
    cls = type(of_a_library)
    assert [by(cls), by(cls)] == [True, False]
    try:
        check_recipe(cls, of_a_library)
        pairs, spec = pytree.tree_flatten_with_path(of_a_library)
        leaves = {pytree.keystr(path): leaf for path, leaf in pairs}
        assert leaves[".w['x']"] is of_a_library.w["x"]
        assert leaves.keys() - {".size"} == {".w['x']", ".w['y']"}
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
        doubled = pytree.tree_map(lambda t: 2 * t, of_a_library)
        assert (type(doubled), doubled.w["x"].tolist()) == (cls, [2, 2])
        assert int(doubled.size) == (6 if ".size" in leaves else 3)
    finally:
        unregister_class_flattening(cls)


def test_a_program_of_a_mirrored_class_runs_in_a_fresh_process(tmp_path):
    """The static part is stored as plain data, so a program that was saved takes the class's objects elsewhere."""
    pytest.importorskip("equinox", reason="equinox writes one class")
    pytest.importorskip("flax.struct", reason="flax writes the other")
    (tmp_path / "states.py").write_text(
        textwrap.dedent("""
            import equinox, flax.struct, jax, torch
            import torch.utils._pytree as pytree
            from yobx_flatten import mirror

            @flax.struct.dataclass
            class Flax:
                w: object
                size: tuple = flax.struct.field(pytree_node=False, default=(2, 3))

            class Equinox(equinox.Module):
                inner: object
                mode: str = equinox.field(static=True)

            class Double(torch.nn.Module):
                def forward(self, state):
                    return pytree.tree_map(lambda t: 2 * t, state)

            mirror(Flax)
            mirror(Equinox)
            example = Equinox(Flax(torch.ones(2)), "fast")
        """)
    )
    save = "from states import *; torch.export.save(torch.export.export(Double(), (example,)), 'p.pt2')"
    load = (
        "from states import *; found = torch.export.load('p.pt2').module()(example)\n"
        "print(type(found).__name__, found.mode, found.inner.size, found.inner.w.tolist())"
    )
    printed = ""
    for code in (save, load):
        printed = fresh_process.run("-c", code, cwd=tmp_path).stdout
    assert printed == "Equinox fast (2, 3) [2.0, 2.0]\n"


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        (None, ["[0]", "[1]"]),
        ([jax.tree_util.GetAttrKey("a"), jax.tree_util.GetAttrKey("b")], [".a", ".b"]),
        ([jax.tree_util.DictKey("a"), jax.tree_util.DictKey(1)], ["['a']", "[1]"]),
        ([jax.tree_util.SequenceKey(0), jax.tree_util.FlattenedIndexKey(1)], ["[0]", "[1]"]),
    ],
    ids=["none", "attributes", "keys of a dict", "positions"],
)
def test_keys_of_jax_become_keys_of_torch(mirrored, keys, shown):
    cls = with_jax(pair_class(), keys)
    mirrored(cls)
    pairs, spec = pytree.tree_flatten_with_path(cls(1, None))
    assert [pytree.keystr(path) for path, _ in pairs] == shown
    assert all(type(path[0]) in (pytree.GetAttrKey, pytree.MappingKey, pytree.SequenceKey) for path, _ in pairs)
    assert (spec.context, [leaf for _, leaf in pairs]) == (("pair", 4), [1, None])


def test_a_child_may_be_none_or_a_container(mirrored):
    cls = with_jax(pair_class())
    mirrored(cls)
    obj = cls(None, {"x": [1, cls(2, 3)]}, "outer")
    assert pytree.tree_leaves(obj) == [None, 1, 2, 3]
    assert pytree.tree_map(lambda x: x, obj) == obj
    node = pytree.SUPPORTED_NODES[cls]
    assert vars(node.unflatten_fn(["anything", None], ("x", 1))) == {"a": "anything", "b": None, "name": "x"}


def test_mirroring_twice_changes_nothing():
    optree = pytest.importorskip("optree", reason="the other library")
    cls = with_jax(pair_class())
    both = ("torch", "optree")
    assert [mirror(cls), mirror(cls), mirror(cls, to=both), mirror(cls, to=both)] == [True, False, True, False]
    assert optree.tree_leaves(cls(1, 2), namespace="yobx_flatten") == [1, 2]
    unregister_class_flattening(cls)
    assert pytree.tree_leaves(obj := cls(1, 2)) == optree.tree_leaves(obj, namespace="yobx_flatten") == [obj]
    assert jax.tree.leaves(obj) == [1, 2]
    with pytest.raises(NotRegisteredError):
        unregister_class_flattening(cls)
    assert mirror(cls) is True
    unregister_class_flattening(cls)


def test_functions_of_your_own_and_of_others_are_not_replaced():
    cls, other = with_jax(pair_class()), with_jax(pair_class())
    register_class_flattening(cls, lambda p: ([p.a], (p.b, p.name)), lambda c, s: cls(*c, *s), None)
    other_libraries.register(other, name="test_mirror.Pair")
    try:
        with pytest.raises(AlreadyRegisteredError, match="with other functions"):
            mirror(cls)
        assert pytree.tree_leaves(cls(1, 2)) == [1]
        assert mirror(other) is False
        assert pytree.SUPPORTED_NODES[other].flatten_fn is other_libraries.their_flatten
    finally:
        unregister_class_flattening(cls)
        other_libraries.forget(other)


def test_static_data_that_cannot_be_stored_is_refused_where_there_is_an_example():
    cls = pair_class()
    jax.tree_util.register_pytree_node(
        cls, lambda p: ((p.a,), {"b": [p.b]}), lambda static, children: cls(*children, static["b"][0])
    )
    with pytest.raises(RoundTripError, match=r"static\['b'\]\[0\]"):
        mirror(cls, f_check=lambda: cls(torch.ones(1), object()))
    assert cls not in pytree.SUPPORTED_NODES


@dataclasses.dataclass
class Step:
    x: Any
    size: list


@pytest.fixture
def known_to_torch():
    cls = type("Step", (Step,), {})
    pytree.register_pytree_node(
        cls,
        lambda s: ([s.x], {"size": s.size}),
        lambda children, static: cls(*children, static["size"]),
        flatten_with_keys_fn=lambda s: ([(pytree.GetAttrKey("x"), s.x)], {"size": s.size}),
        serialized_type_name="test_mirror.Step",
    )
    yield cls
    other_libraries.forget(cls)


def test_a_class_of_torch_is_a_node_of_jax(mirrored, known_to_torch):
    assert mirrored(known_to_torch, source="torch", to="jax") is True
    step = known_to_torch(jnp.arange(3.0), [1, 2])
    traced = []

    @jax.jit
    def double(s):
        traced.append(s.size)
        return known_to_torch(2 * s.x, s.size)

    for _ in range(2):
        assert (double(step).x.tolist(), double(step).size) == ([0, 2, 4], [1, 2])
    double(known_to_torch(step.x, [1, 3]))
    assert traced == [[1, 2], [1, 3]]
    assert jax.grad(lambda s: (s.x**2).sum())(step).x.tolist() == [0, 2, 4]
    assert jax.vmap(double)(step).x.tolist() == [0, 2, 4]
    ((path, _),), _ = jax.tree_util.tree_flatten_with_path(step)
    assert path == (jax.tree_util.GetAttrKey("x"),)
    made = dataclasses.make_dataclass("Made", ["x"])
    register(made, backends="torch")  # as it is registered here
    mirrored(made, source="torch", to="jax")
    assert jax.tree.leaves(made([1, 2])) == [1, 2]


@needs_transformers("5.17", "outputs are registered without keys")
def test_a_model_output_is_a_node_of_jax_and_optree():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    optree = pytest.importorskip("optree", reason="one of the two")
    cls = type("Output", (outputs.BaseModelOutput,), {})  # transformers registers it on the spot
    try:
        assert mirror(cls, source="torch", to=("jax", "optree")) is True
        output = cls(last_hidden_state=jnp.ones(2), hidden_states=(jnp.zeros(1),))
        doubled = jax.jit(lambda o: jax.tree.map(lambda x: x + 1, o))(output)
        assert (type(doubled), doubled.last_hidden_state.tolist(), doubled.attentions) == (cls, [2, 2], None)
        assert optree.tree_paths(output, namespace="yobx_flatten") == [("last_hidden_state",), ("hidden_states", 0)]
        unregister_class_flattening(cls)
    finally:
        other_libraries.forget(cls)


@pytest.mark.parametrize(
    ("kind", "entries", "shown"),
    [
        ("GetAttrEntry", ("a", "b"), [".a", ".b"]),
        ("SequenceEntry", (0, 1), ["[0]", "[1]"]),
        ("MappingEntry", ("a", "b"), ["['a']", "['b']"]),
    ],
)
def test_a_class_of_optree_is_a_node_of_torch_and_jax(mirrored, kind, entries, shown):
    optree = pytest.importorskip("optree", reason="mirrors optree")
    cls = pair_class()
    optree.register_pytree_node(
        cls,
        lambda p: ((p.a, p.b), p.name, entries),
        lambda name, children: cls(*children, name),
        path_entry_type=getattr(optree, kind),
        namespace="test_mirror",
    )
    try:
        assert mirrored(cls, source="optree", to=("torch", "jax"), namespace="test_mirror") is True
        pairs, spec = pytree.tree_flatten_with_path(cls(1, 2))
        assert [(pytree.keystr(path), leaf) for path, leaf in pairs] == list(zip(shown, (1, 2), strict=True))
        assert pytree.tree_unflatten([3, 4], spec) == cls(3, 4)
        assert jax.tree.map(lambda x: 2 * x, cls(1, 2)) == cls(2, 4)
    finally:
        optree.unregister_pytree_node(cls, namespace="test_mirror")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"source": "numpy"}, InvalidArgumentError, "libraries 'torch', 'jax', 'optree', found the str 'numpy'"),
        ({"source": "jax", "to": "tensorflow"}, InvalidArgumentError, "found the str 'tensorflow'"),
        ({"source": "jax", "to": "jax"}, InvalidArgumentError, "to= must name libraries other than source="),
        ({"source": "jax", "to": ()}, InvalidArgumentError, "to= must name libraries other than source="),
        ({"source": "jax"}, NotRegisteredError, "Step is not registered with JAX.*\n    register"),
        ({"source": "torch", "to": "jax"}, NotRegisteredError, "Step is not registered with torch"),
        ({"source": "optree", "namespace": "x"}, NotRegisteredError, r"not registered with optree \(namespace 'x'\)"),
    ],
)
def test_what_cannot_be_mirrored_is_refused(options, error, said):
    with pytest.raises(error, match=said):
        mirror(Step, **options)


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install optree"):
        mirror(Step, source="optree")


def test_mirroring_imports_neither_library():
    code = (
        "import sys, yobx_flatten\n"
        "try:\n    yobx_flatten.mirror(type('C', (), {}))\n"
        "except yobx_flatten.NotRegisteredError:\n    print('jax' in sys.modules)\n"
    )
    assert fresh_process.run("-c", code).stdout == "False\n"
