"""`register_class_flattening`: the class is a node everywhere, and a second registration changes nothing."""

import gc
import weakref

import pytest
import torch.utils._pytree as pytree

from tests.flatten.pair import FUNCTIONS, Pair, flatten, unflatten
from tests.registry_snapshot import changes_since
from yobx_flatten import register_class_flattening, unregister_class_flattening
from yobx_flatten.errors import AlreadyRegisteredError


def test_a_registration_of_others_returns_false_and_stays(registered_by_others, before):
    """A class that somebody registered through torch keeps her functions."""
    assert register_class_flattening(Pair, *FUNCTIONS) is False
    assert changes_since(before) == []


@pytest.mark.parametrize(
    "functions", [(lambda pair: ([], None), unflatten), (flatten, unflatten, lambda pair: ([], None))]
)
def test_other_functions_are_refused(registered, before, functions):
    """A class registered with other functions is named, with the line to type; the first registration stays."""
    with pytest.raises(AlreadyRegisteredError, match=r"pair\.Pair is already .*\n    unregister_class_flattening"):
        register_class_flattening(Pair, *functions)
    assert changes_since(before) == []


def test_a_registered_class_survives_storage():
    """Tuples and integer keys in the static part come back from a stored spec as they were."""
    register_class_flattening(Pair, lambda pair: ([pair.a], (1, {2: pair.b})), lambda c, s: Pair(c[0], s[1][2]), None)
    try:
        spec = pytree.tree_structure(Pair(0, (True, None)))
        stored = pytree.treespec_loads(pytree.treespec_dumps(spec))
    finally:
        unregister_class_flattening(Pair)
    assert stored == spec
    assert stored.context == (1, {2: (True, None)})


def test_a_class_that_came_and_went_is_not_kept_alive():
    """No table of any library holds on to a local class."""
    local = type("Local", (Pair,), {})
    reference = weakref.ref(local)
    register_class_flattening(local, flatten, lambda children, static: None, None)
    pytree.tree_leaves(local(1, 2))
    unregister_class_flattening(local)
    del local
    gc.collect()
    assert reference() is None
