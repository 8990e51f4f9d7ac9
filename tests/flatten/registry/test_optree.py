"""optree, in our own namespace: accessors, and registrations that were there before optree was."""

import pytest
import torch.utils._pytree as pytree

from tests import fresh_process
from tests.flatten.nodes import Dense, Keyed, LinearParams
from tests.flatten.pair import Pair
from yobx_flatten import register_class_flattening, unregister_class_flattening

optree = pytest.importorskip("optree", reason="optree is not installed")

NAMESPACE = "yobx_flatten"


def flatten(pair):
    return [pair.a, pair.b], ["static", {"data": 1}]


def unflatten(children, static):
    assert static == ["static", {"data": 1}]
    return Pair(*children)


def flatten_with_keys(pair):
    # a key of each kind
    return [(pytree.MappingKey(0), pair.a), (pytree.SequenceKey(1), pair.b)], ["static", {"data": 1}]


@pytest.fixture
def registered():
    register_class_flattening(Pair, flatten, unflatten, flatten_with_keys, backends=("optree",))
    yield
    unregister_class_flattening(Pair)


def accessors(tree):
    return optree.tree_accessors(tree, namespace=NAMESPACE)


def test_accessors_read_like_python():
    tree = {"a": [Dense(1, 2)], "b": Keyed(3, 4)}
    assert [accessor.codify("inputs") for accessor in accessors(tree)] == [
        "inputs['a'][0].weights",
        "inputs['a'][0].bias",
        "inputs['b']['first']",
        "inputs['b']['second']",
    ]
    assert [accessor(tree) for accessor in accessors(tree)[:2]] == [1, 2]
    assert repr(optree.tree_paths([Dense(1, 2)], namespace=NAMESPACE)) == "[(0, 'weights'), (0, 'bias')]"
    # optree's own word for a child whose author gave no key
    assert accessors(LinearParams(1, 2))[0].codify("x") == "x[<flat index 0>]"


def test_keys_static_data_that_does_not_hash_and_other_namespaces(registered):
    pair = Pair(1, 2)
    assert [type(accessor[0]) for accessor in accessors(pair)] == [optree.MappingEntry, optree.SequenceEntry]
    leaves, spec = optree.tree_flatten(pair, namespace=NAMESPACE)
    assert leaves == [1, 2]
    assert spec == optree.tree_structure(Pair(3, 4), namespace=NAMESPACE)
    assert vars(optree.tree_unflatten(spec, [3, 4])) == {"a": 3, "b": 4}
    assert optree.tree_leaves(pair) == optree.tree_leaves(pair, namespace="torch") == [pair]


LATE = """
import sys
from tests.flatten.nodes import Dense, LinearParams
from yobx_flatten import unregister_class_flattening
from yobx_flatten.registry.patches import ImportHook

def hooks():
    return [finder for finder in sys.meta_path if isinstance(finder, ImportHook)]

assert not {"optree", "jax"} & set(sys.modules) and len(hooks()) == 2
unregister_class_flattening(LinearParams)
import optree
leaves = lambda tree: optree.tree_leaves(tree, namespace="yobx_flatten")
assert leaves(Dense(1, 2)) == [1, 2]
linear = LinearParams(1, 2)
assert leaves(linear) == [linear]
assert len(hooks()) == 1  # the one that waits for jax
unregister_class_flattening(Dense)
dense = Dense(1, 2)
assert leaves(dense) == [dense]
"""


def test_a_registration_made_before_the_import_reaches_optree():
    fresh_process.run("-c", LATE)
