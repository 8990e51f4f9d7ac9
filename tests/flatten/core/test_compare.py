"""The one comparison: what it sees, and what it takes for the same."""

import math
from collections import OrderedDict

import numpy
import pytest
import torch

from yobx_flatten import ReplayError
from yobx_flatten.core.compare import compare, largest_difference, tolerance
from yobx_flatten.diagnose.comparison import compare_outputs

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


def test_components_of_nested_tensors_are_compared():
    one = torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)], layout=torch.jagged)
    other = torch.nested.nested_tensor([torch.zeros(2), torch.full((3,), 3.0)], layout=torch.jagged)
    assert largest_difference(one, other) == 2.0


def test_nested_tensors_of_other_components_are_refused():
    one = torch.nested.nested_tensor([torch.zeros(2), torch.ones(2)], layout=torch.jagged)
    more = torch.nested.nested_tensor([torch.zeros(2)] * 3, layout=torch.jagged)
    with pytest.raises(ReplayError, match="only the expected tensor is a nested tensor"):
        largest_difference(one, torch.zeros(2, 2))
    with pytest.raises(ReplayError, match="only the found tensor is a nested tensor"):
        largest_difference(torch.zeros(2, 2), one)
    with pytest.raises(ReplayError, match="expected 2 components, found 3"):
        largest_difference(one, more)


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


@pytest.mark.parametrize("kind", ["layers", "sums", "kernels"])
def test_numbers_that_are_not_finite_are_equal_only_to_themselves(kind):
    expected = torch.tensor([1.0, torch.nan])
    assert compare(expected, expected.clone(), kind)
    assert not compare(expected, torch.tensor([1.0, 2.0]), kind)
    assert not compare(torch.tensor([torch.inf]), torch.tensor([-torch.inf]), kind)
    assert compare(expected, torch.ones(3), kind).difference == torch.inf
