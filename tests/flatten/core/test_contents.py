"""What an object holds is read where Python keeps it; no code of the object runs."""

import collections
import functools
import types
import weakref

import numpy
import pytest
import torch

from yobx_flatten.core.contents import Layouts, size_in_bytes
from yobx_flatten.trees.walk import format_key

X = torch.zeros(2, 3)


def held(obj):
    return dict(Layouts()(type(obj)).children(obj))


class Plain:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("__hidden", "key", "never_set")

    def __init__(self, key):
        self.key = key
        self.__hidden = 1


class Both(Slotted):
    def __init__(self, key, more):
        super().__init__(key)
        self.more = more


class Items(dict):
    pass


def test_slots_are_read_also_of_bases_and_only_where_set():
    assert held(Both(1, 2)) == {".key": 1, "._Slotted__hidden": 1, ".more": 2}


def test_items_of_built_in_containers_are_read():
    items = Items(a=1)
    items.note = 2
    assert held(items) == {".note": 2, "['a']": 1}
    assert held(collections.deque([5])) == {"[0]": 5}
    assert held((5, 6)) == {"[0]": 5, "[1]": 6}
    assert held({7}) == {"{0}": 7}


def test_the_arguments_of_a_partial_are_data():
    assert held(functools.partial(print, X))[".args"] == (X,)


@pytest.mark.parametrize(
    "closed",
    [3, "a", None, len, lambda: X, X.add, Plain, types, weakref.ref(Plain()), torch.float16, (i for i in [X])],
    ids=lambda obj: type(obj).__name__,
)
def test_code_and_plain_values_are_not_looked_into(closed):
    """Neither closures nor globals belong to an input."""
    assert Layouts()(type(closed)).is_closed


class Trap:
    def __init__(self):
        vars(self)["x"] = X

    def fail(self, *args):
        raise AssertionError("the code of an object ran")

    __getattr__ = __eq__ = __len__ = __iter__ = __bool__ = __repr__ = __hash__ = fail
    __class__ = property(fail)
    size = property(fail)


class TrapDict(dict):
    items = keys = values = __iter__ = __len__ = __getitem__ = Trap.fail


def test_no_code_of_an_object_runs():
    (found,) = Layouts()(Trap).children(Trap())
    assert found[0] == ".x"
    assert found[1] is X
    ((step, value),) = Layouts()(TrapDict).children(TrapDict(a=X))
    assert step == "['a']"
    assert value is X


def test_an_attribute_called_dict_is_not_asked():
    """A class may define a property of that name; the base's own dictionary is read."""

    class Hidden(Plain):
        __dict__ = property(Trap.fail)

    hidden = Hidden.__new__(Hidden)
    hidden.a = 1
    assert held(hidden) == {".a": 1}


@pytest.mark.parametrize(
    ("key", "spelled"),
    [("a", "'a'"), (1, "1"), ((1, ("b",)), "(1, ('b',))"), (Plain(), "<Plain>"), (Plain, "<Plain>"), (None, "None")],
)
def test_keys_are_spelled_without_asking_them(key, spelled):
    assert format_key(key) == spelled


def test_sizes_are_those_of_the_elements():

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("the code of an object ran")

    assert size_in_bytes(X) == 24
    assert size_in_bytes(numpy.zeros((2, 3))) == 48
    assert size_in_bytes(X.as_subclass(Own)) == 24


def test_a_tensor_that_knows_no_size_counts_nothing():
    ragged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    assert size_in_bytes(ragged) in (0, 20)
