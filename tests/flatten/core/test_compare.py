"""The one comparison, and what an object holds: read where Python keeps it."""

import collections
import functools
import math
import types
import weakref
from collections import OrderedDict

import numpy
import pytest
import torch

from yobx_flatten import ReplayError
from yobx_flatten.core.compare import compare, largest_difference, share_of_nan, tolerance
from yobx_flatten.core.contents import Layouts, size_in_bytes
from yobx_flatten.diagnose.comparison import compare_outputs
from yobx_flatten.trees.walk import format_key

NAN, INF = math.nan, math.inf
T = torch.tensor


def BYTE(value):  # noqa: N802 # stands in tables, beside T
    return T([value], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("expected", "found", "difference"),
    [
        (T([1.0, 2.0]), T([1.0, 2.5]), 0.5),
        (T([1 + 1j]), T([1 - 1j]), 2.0),
        (T([complex(NAN, 1)]), T([complex(NAN, 2)]), 1.0),
        (T([1 + 1j]).conj(), T([1 - 1j]), 0.0),
        (T([2**60]), T([2**60 + 1]), 1.0),
        (T([2**63 + 1], dtype=torch.uint64), T([2**63], dtype=torch.uint64), 1.0),
        (2**100, 2**100 + 3, 3.0),
        (T([True, False]), T([True, True]), 1.0),
        (T([NAN, INF]), T([NAN, INF]), 0.0),
        (T([NAN]), T([1.0]), INF),
        (T([INF]), T([-INF]), INF),
        (T([INF]), T([1.0]), INF),
        (NAN, NAN, 0.0),
        (1.5, 1.0, 0.5),
        (3, T(4), 1.0),
        (torch.zeros(0, 3), torch.zeros(0, 3), 0.0),
        (T([1.0, 2.0]).to(torch.float8_e4m3fn), T([1.0, 1.0]).to(torch.float8_e4m3fn), 1.0),
        (T([1.0, NAN]).to(torch.float8_e5m2), T([1.0, NAN]).to(torch.float8_e5m2), 0.0),
        (BYTE(17).view(torch.float4_e2m1fn_x2), BYTE(16).view(torch.float4_e2m1fn_x2), INF),
        (BYTE(17).view(torch.uint4), BYTE(17).view(torch.uint4), 0.0),
        (T([[1.0, 0.0]]).to_sparse(), T([[1.0, 0.5]]).to_sparse(), 0.5),
        (numpy.array([1.0]), T([1.5], dtype=torch.float64), 0.5),
        (numpy.array(["a", "b"]), numpy.array(["a", "b"], object), 0.0),
        ("relu", "relu", 0.0),
        (None, None, 0.0),
        (torch.float16, torch.float16, 0.0),
    ],
)  # fmt: skip
def test_the_difference_is_that_of_the_worst_element(expected, found, difference):
    assert largest_difference(expected, found) == difference


def test_components_of_nested_tensors_are_compared_and_others_are_refused():
    one, other, more = (
        torch.nested.nested_tensor(parts, layout=torch.jagged)
        for parts in ([torch.zeros(2), torch.ones(3)], [torch.zeros(2), torch.full((3,), 3.0)], [torch.zeros(2)] * 3)
    )
    assert largest_difference(one, other) == 2.0
    with pytest.raises(ReplayError, match="expected a tensor with is_nested=True, found is_nested=False"):
        largest_difference(one, torch.zeros(2, 2))
    with pytest.raises(ReplayError, match="expected a tensor with is_nested=False, found is_nested=True"):
        largest_difference(torch.zeros(2, 2), one)
    with pytest.raises(ReplayError, match="expected 2 components, found 3"):
        largest_difference(one, more)
    assert size_in_bytes(one) in (0, 20)


# torch is about to leave the type out, and warns of its constructor
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning", "ignore:.*TypedStorage:UserWarning")
def test_quantized_tensors_are_compared_by_what_they_stand_for():
    one, other = (torch.quantize_per_tensor(T([1.0, value]), 0.5, 0, torch.qint8) for value in (2.0, 2.5))
    assert largest_difference(one, other) == 0.5


@pytest.mark.parametrize(
    ("expected", "found", "message"),
    [
        (T([1, 2]), T([1.0, 2.0]), "expected torch.int64, found torch.float32"),
        (T([1.0]), T([1.0], dtype=torch.float16), "expected torch.float32, found torch.float16"),
        (T([1.0]), T([1.0, 2.0]), r"expected shape \(1,\), found \(2,\)"),
        (None, T([1.0]), r"expected None, found a tensor of shape \(1,\)"),
        (T([1.0]), None, r"expected a tensor of shape \(1,\), torch.float32, found None"),
        ("relu", "gelu", "expected the str 'relu', found the str 'gelu'"),
        ("relu", None, "expected the str 'relu', found None"),
        (torch.float16, torch.float32, "expected the dtype torch.float16, found the dtype torch.float32"),
    ],
)
def test_what_has_no_difference_is_an_error(expected, found, message):
    with pytest.raises(ReplayError, match=message):
        largest_difference(expected, found)


@pytest.mark.parametrize(
    ("expected", "found", "message"),
    [
        ({"y": True}, {"y": False}, None),
        ({"y": True}, {"y": 1}, "output 'y': expected the bool True, found the int 1"),
        ({"y": 3}, {"y": T(3)}, r"output 'y': expected the int 3, found a tensor of shape \(\)"),
        ({"y": T([1.0])}, {"y": None}, "output 'y': expected a tensor"),
        ([T([1.0])], (T([1.0]),), "a different structure: output expected: list of 1 found: tuple of 1"),
        (
            {"y": T([1.0])},
            OrderedDict(y=T([1.0])),
            "a different structure: output expected: dict .* found: OrderedDict",
        ),
        ({"y": [1]}, {"y": [1, 2]}, r"a different structure: output\['y'\] expected: list of 1 found: list of 2"),
    ],
)
def test_outputs_are_of_one_structure_and_of_the_same_kinds(expected, found, message):
    names = ["y"]
    if message is None:
        assert compare_outputs(expected, found, names) == {"y": 1.0}
        return
    with pytest.raises(ReplayError, match=message):
        compare_outputs(expected, found, names)


@pytest.mark.parametrize("kind", ["file", "layers", "gradients", "sums", "kernels"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rounding_of_a_dtype_passes_and_twice_as_much_does_not(kind, dtype):
    expected = torch.linspace(0.5, 1.5, 64, dtype=torch.float64).to(dtype)
    rounded = (expected.double() * (1 + torch.finfo(dtype).eps)).to(dtype)
    assert not torch.equal(rounded, expected)
    assert compare(expected, rounded, kind)
    found = compare(expected, (expected.double() * 2).to(dtype), kind)
    assert not found
    assert found.difference > found.allowed


def test_rounding_depends_on_the_coarsest_dtype():
    """1e-6 for layers in 32 bits and more, 3 % in bfloat16; gradients are added up in another order."""
    assert tolerance("layers", torch.float32) == tolerance("layers", torch.float64) == tolerance("layers") == 1e-6
    assert tolerance("layers", torch.float32, torch.bfloat16) == pytest.approx(4 * 2**-7)
    assert tolerance("gradients", torch.float32) == pytest.approx(1e-5)
    assert tolerance("file", torch.int64, "bfloat16", "float16") == 0.2
    assert (tolerance("file", "float32", "float16"), tolerance("file")) == (0.06, 0.0001)
    assert compare(T([3.0, 4.0]), T([3.0, 4.5]), "layers").difference == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["layers", "sums", "kernels"])
def test_numbers_that_are_not_finite_are_equal_only_to_themselves(kind):
    expected = torch.tensor([1.0, torch.nan])
    assert compare(expected, expected.clone(), kind)
    assert not compare(expected, torch.tensor([1.0, 2.0]), kind)
    assert not compare(torch.tensor([torch.inf]), torch.tensor([-torch.inf]), kind)
    assert compare(expected, torch.ones(3), kind).difference == torch.inf


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


def test_slots_of_bases_attributes_and_items_of_built_in_containers_are_read():
    assert held(Both(1, 2)) == {".key": 1, "._Slotted__hidden": 1, ".more": 2}
    items = type("Items", (dict,), {})(a=1)
    items.note = 2
    assert held(items) == {".note": 2, "['a']": 1}
    assert held(collections.deque([5])) == {"[0]": 5}
    assert held((5, 6)) == {"[0]": 5, "[1]": 6}
    assert held({7}) == {"{0}": 7}
    assert held(functools.partial(print, X))[".args"] == (X,)


@pytest.mark.parametrize(
    "closed",
    [3, "a", None, len, lambda: X, X.add, Plain, types, weakref.ref(Plain()), torch.float16, (i for i in [X])],
    ids=lambda obj: type(obj).__name__,
)
def test_code_and_plain_values_are_not_looked_into(closed):
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

    class Hidden(Plain):  # a property of that name: the dictionary of the base is read
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


def test_the_share_of_nan_is_one_without_a_finite_element():
    values = torch.tensor([1.0, math.nan]), torch.tensor([math.nan, math.inf]), 3
    assert [share_of_nan(value) for value in values] == [0.5, 1.0, 0.0]
