"""One class in torch and JAX: every transform of JAX takes it, and JAX never forgets it."""

import dataclasses
from typing import Any

import pytest
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree

from tests import fresh_process
from tests.flatten.nodes import Dense, DenseParams, FieldState, Keyed, LinearParams, MyState, TrainState
from yobx_flatten import AlreadyRegisteredError, StaticDataError, register_class_flattening, unregister_class_flattening
from yobx_flatten.registry.claims import REGISTRY

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy


@pytest.mark.parametrize(
    "obj",
    [TrainState({"w": 1}, {}, 3), FieldState({"w": 1}, {}, 3), MyState(1, 2), LinearParams(1, 2), DenseParams(1, 2)],
    ids=lambda obj: type(obj).__name__,
)
def test_a_class_is_mapped_and_compiled(obj):
    expected = [2 * leaf for leaf in pytree.tree_leaves(obj)]
    doubled = jax.tree.map(lambda leaf: 2 * leaf, obj)
    compiled = jax.jit(lambda tree: jax.tree.map(lambda leaf: 2 * leaf, tree))(obj)
    for found in (doubled, compiled):
        assert (type(found), [int(leaf) for leaf in jax.tree.leaves(found)]) == (type(obj), expected)


@pytest.mark.parametrize("cls", [DenseParams, Dense])
def test_grad_and_vmap_go_through_the_class(cls):
    layer = cls(jnp.ones((3, 4)), jnp.zeros(4), activation="relu")
    grads = jax.grad(lambda l: jnp.sum(l.weights))(layer)  # noqa: E741 # as in the lesson
    assert grads.weights.tolist() == [[1.0] * 4] * 3
    assert grads.activation == "relu"
    layer = cls(jnp.ones((5, 3)), jnp.zeros(5), activation="gelu")
    mapped = jax.vmap(lambda row: cls(row.weights + 1, row.bias, row.activation))(layer)
    assert mapped.weights.tolist() == [[2.0] * 3] * 5
    assert mapped.activation == "gelu"


def test_paths_have_keys_of_jax():
    paths = [
        path for path, _ in jax.tree_util.tree_flatten_with_path([Dense(1, 2), Keyed(3, 4), LinearParams(5, 6)])[0]
    ]
    assert [jax.tree_util.keystr(path) for path in paths] == [
        "[0].weights", "[0].bias", "[1]['first']", "[1]['second']", "[2][0]", "[2][1]",
    ]  # fmt: skip


def make_class():

    class Pair:
        def __init__(self, a: Any, b: Any, static: Any = None) -> None:
            self.a, self.b, self.static = a, b, static

    return Pair


def register(cls, *, swapped=False, backends="all"):
    def flatten(pair):
        return [pair.b, pair.a] if swapped else [pair.a, pair.b], pair.static

    def unflatten(children, static):
        a, b = reversed(children) if swapped else children
        return cls(a, b, static)

    functions = flatten, unflatten, None
    assert register_class_flattening(cls, *functions, backends=backends)
    return functions


def test_one_declaration_drives_every_library_twice_with_removal_in_between():
    import optree
    from torch.utils import _cxx_pytree as cxx_pytree

    cls, seen = make_class(), []
    pair = cls(1, 2, "static")

    def leaves():
        spec = pytree.tree_structure(pair)
        return [
            pytree.tree_leaves(pair),
            cxx_pytree.tree_leaves(pair),
            fx_pytree.tree_flatten_spec(pair, spec),
            optree.tree_leaves(pair, namespace="yobx_flatten"),
            jax.tree.leaves(pair),
        ]

    for _ in range(2):
        register(cls)
        seen.append(leaves())
        unregister_class_flattening(cls)
        seen.append(leaves())
    assert seen == [[[1, 2]] * 5, [[pair]] * 4 + [[1, 2]]] * 2


def test_a_compiled_function_outlives_the_registration():
    cls, traces = make_class(), []
    functions = register(cls)

    @jax.jit
    def difference(pair):
        traces.append(pair.static)
        return cls(pair.a - pair.b, pair.b, pair.static)

    pair = cls(jnp.array(5.0), jnp.array(3.0), "static")
    results = [difference(pair)]
    unregister_class_flattening(cls)
    results.append(difference(pair))
    register_class_flattening(cls, *functions, backends=("jax",))
    results.append(difference(pair))
    unregister_class_flattening(cls)
    assert [(float(result.a), result.static) for result in results] == [(2.0, "static")] * 3
    assert traces == ["static"]


def test_other_functions_replace_the_behaviour_and_compile_anew():
    cls, traces = make_class(), []
    register(cls)
    subtract = jax.jit(lambda pair: traces.append(1) or pair.a - pair.b)
    pair = cls(jnp.array(5.0), jnp.array(3.0))
    old = jax.tree.structure(pair)
    assert float(subtract(pair)) == 2.0
    unregister_class_flattening(cls)
    register(cls, swapped=True)
    assert [float(leaf) for leaf in jax.tree.leaves(pair)] == [3.0, 5.0]
    assert float(subtract(pair)) == 2.0
    assert len(traces) == 2
    # a definition made before puts together by the functions it was made with
    assert jax.tree.structure(pair) != old
    assert jax.tree.unflatten(old, ["a", "b"]).a == "a"
    assert jax.tree.unflatten(jax.tree.structure(pair), ["b", "a"]).a == "a"
    unregister_class_flattening(cls)


def test_static_data_that_does_not_hash_passes_through_jit_and_what_cannot_hash_is_named():
    cls, traces = make_class(), []
    register(cls)
    same = jax.jit(lambda pair: traces.append(1) or pair)
    static = {"names": ["a", "b"], "sizes": {1: (2, 3)}}
    first = same(cls(jnp.ones(1), jnp.ones(1), static))
    second = same(cls(jnp.ones(1), jnp.ones(1), {"sizes": {1: (2, 3)}, "names": ["a", "b"]}))
    static["names"].append("c")
    third = same(cls(jnp.ones(1), jnp.ones(1), static))
    unregister_class_flattening(cls)
    assert first.static == second.static == {"names": ["a", "b"], "sizes": {1: (2, 3)}}
    assert third.static["names"] == ["a", "b", "c"]
    assert len(traces) == 2

    @dataclasses.dataclass
    class Config:  # eq without hash
        window: int

    cls = make_class()
    register(cls, backends=("jax",))
    with pytest.raises(StaticDataError, match=r"Config.* is not hashable. JAX needs hashable static data"):
        jax.tree.flatten(cls(1, 2, Config(3)))
    unregister_class_flattening(cls)


def test_a_class_that_jax_knows_from_others_keeps_their_functions_there():
    cls = make_class()
    jax.tree_util.register_pytree_node(cls, lambda pair: ((pair.a,), pair.b), lambda b, a: cls(*a, b))
    pair = cls(1, 2)
    register(cls)
    assert (pytree.tree_leaves(pair), jax.tree.leaves(pair)) == ([1, 2], [1])
    assert REGISTRY.recipe_in_force(cls, "jax") is None
    (backend,) = REGISTRY._libraries["jax"]
    with pytest.raises(AlreadyRegisteredError, match="by other code, and JAX cannot replace a registration"):
        backend.write(REGISTRY.recipe_in_force(cls))
    unregister_class_flattening(cls)
    assert (pytree.tree_leaves(pair), jax.tree.leaves(pair)) == ([pair], [1])


LATE = """
import sys
from tests.flatten.nodes import Dense, LinearParams
from yobx_flatten import register_class_flattening, unregister_class_flattening

class Later:
    def __init__(self, x):
        self.x = x

assert "jax" not in sys.modules
register_class_flattening(Later, lambda o: ([o.x], None), lambda c, s: Later(*c), None, backends=("jax",))
unregister_class_flattening(LinearParams)
assert "jax" not in sys.modules
import jax
linear = LinearParams(1, 2)
assert jax.tree.leaves([Dense(1, 2), Later(3)]) == [1, 2, 3]
assert jax.tree.leaves(linear) == [linear]  # taken back before JAX heard of it
"""


def test_a_registration_made_before_the_import_reaches_jax():
    fresh_process.run("-c", LATE)
