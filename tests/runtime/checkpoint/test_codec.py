"""Tests of roundpipe_runtime.checkpoint.tensor_files: nested states through JSON and back."""

import collections
import json
import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from roundpipe_runtime.checkpoint import CheckpointError
from roundpipe_runtime.checkpoint.tensor_files import decode, encode


def round_trip(value):
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, "value", tensors), allow_nan=False)
    return decode(json.loads(text), tensors)


@pytest.mark.parametrize(
    "value",
    [
        2**70,
        0.1,
        5e-324,
        math.inf,
        -math.inf,
        b"\x00\xff",
        (0.9, (0.99,)),
        1 + 2j,
        {"a": 1, "$tensor": 2},
        {0: "zero", (1, 2): "pair", None: "none"},
        {"$tuple": [1]},
        {3, 1},
        collections.OrderedDict([("b", 1), ("a", 2)]),
        collections.Counter({30: 2, 10: 1}),
        collections.deque([1, 2], maxlen=5),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cuda", 1),
        (3, tuple(range(625)), None),
    ],
    ids=repr,
)
def test_a_value_comes_back_as_it_was(value):
    found = round_trip(value)
    assert found == value
    assert type(found) is type(value)


KEYS = st.text(max_size=8) | st.integers() | st.tuples(st.integers(), st.text(max_size=3))
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | KEYS
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
)


@given(VALUES)
def test_any_nest_comes_back(value):
    """Classes included, which `==` does not tell apart: 1 and True, 0.0 and -0.0."""
    assert repr(round_trip(value)) == repr(value)


def test_nan_comes_back():
    """JSON has no word for it."""
    assert math.isnan(round_trip({"loss": math.nan})["loss"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_a_tensor_comes_back_as_a_copy(dtype):
    tensor = torch.ones(2, 3).to(dtype)
    found = round_trip([tensor])[0]
    assert found.dtype == dtype
    assert torch.equal(found, tensor)
    found.zero_()
    assert tensor.all()


def test_names_of_tensors_are_their_places():
    tensors: dict[str, torch.Tensor] = {}
    encode({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}, "root", tensors)
    assert {name: tensor.item() for name, tensor in tensors.items()} == {"root.a.b": 0.0, "root.a.b~2": 1.0}


def test_arrays_and_scalars_of_numpy():
    """What a state of NumPy's generator is made of."""
    found = round_trip({"key": numpy.arange(4, dtype=numpy.uint32), "loss": numpy.float64(0.1)})
    assert found["key"].dtype == numpy.uint32
    assert found["key"].tolist() == [0, 1, 2, 3]
    assert type(found["loss"]) is numpy.float64
    assert found["loss"] == 0.1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.Generator(), r"position\.x is a torch\._C\.Generator.*\n    generator\.get_state\(\)"),
        (torch.nn.Linear(1, 1), r"position\.x is a torch.*Linear.*\n    x\.state_dict\(\)"),
        (object(), r"position\.x is a builtins\.object, which a checkpoint cannot contain"),
        (torch.eye(2).to_sparse(), r"position\.x is a Tensor of layout torch\.sparse_coo"),
        (numpy.array(["text"]), r"position\.x is an array of <U4"),
    ],
)
def test_what_cannot_be_stored_is_named(value, message):
    """Nothing is pickled: the place, the class, and the line to type."""
    with pytest.raises(CheckpointError, match=message):
        encode({"x": value}, "position", {})


def test_a_tensor_that_is_made_of_others_is_stored_as_these():
    """Moments in 8 bits are such; their class is one that its library gave to torch as safe to load."""
    moment = TwoTensor(torch.arange(6.0).view(2, 3), torch.ones(2, 3))
    with torch.serialization.safe_globals([TwoTensor]):
        found = round_trip({"moment": moment})["moment"]
    assert type(found) is TwoTensor
    assert torch.equal(found.a, moment.a)
    assert torch.equal(found.b, moment.b)
    assert found.a is not moment.a


def test_a_class_that_torch_does_not_know_is_not_imported():
    """A file could name any; the error states which import makes it known."""
    with pytest.raises(CheckpointError, match=r"class TwoTensor.*\n    import torch.testing._internal.two_tensor"):
        round_trip(TwoTensor(torch.ones(2), torch.ones(2)))
