"""What cannot be stored is refused, with its place and a way out."""

import numpy
import pytest
import torch
from torch._subclasses import FakeTensorMode

from yobx_flatten import InvalidArgumentError, StaticDataError
from yobx_flatten.storage.structure import take_apart


def fake():
    with FakeTensorMode():
        return torch.zeros(2)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
        fake(),
    ],
    ids=["sparse", "meta", "fake"],
)
def test_a_tensor_without_plain_data_is_refused(tensor):
    with pytest.raises(InvalidArgumentError, match=r"^a\.0 is a tensor of type .*no plain data to store"):
        take_apart({"a": [tensor]})


@pytest.mark.parametrize(
    "array",
    [
        numpy.array([object()], dtype=object),
        numpy.zeros(2, dtype=[("a", "i4")]),
        numpy.ma.masked_array([1, 2], [True, False]),
        numpy.ma.masked_array(["a", "b"], [True, False]),
        numpy.zeros(2, dtype=numpy.longdouble),
    ],
    ids=["objects", "structured", "masked", "masked text", "longdouble"],
)
def test_an_array_without_counterpart_is_refused(array):
    with pytest.raises(InvalidArgumentError, match=r"^a\.0 is a .*no counterpart in ONNX"):
        take_apart({"a": [array]})


def test_other_leaves_are_refused():
    """A generator, say; the message says where."""
    with pytest.raises(StaticDataError, match=r"generator.* at a\.0"):
        take_apart({"a": [(x for x in [])]})


def test_an_array_of_jax_is_refused_with_the_line_to_type():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    with pytest.raises(InvalidArgumentError, match=r"^a is an array of JAX.*\n    numpy\.asarray\(array\)"):
        take_apart({"a": jax.numpy.zeros(2)})


def test_data_are_read_when_they_are_asked_for():
    """Taking a tensor apart copies nothing."""
    tensor = torch.zeros(3)
    (payload,) = take_apart(tensor).payloads
    tensor += 1
    assert numpy.frombuffer(payload.data(), "float32").tolist() == [1, 1, 1]
    assert payload.nbytes == 12


def test_a_contiguous_tensor_is_not_copied():
    tensor = torch.zeros(3)
    (payload,) = take_apart(tensor).payloads
    payload.data()[:4] = numpy.float32(2.0).tobytes()
    assert tensor.tolist() == [2, 0, 0]
