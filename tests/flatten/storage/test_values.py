"""A nested object as JSON and back. What cannot be stored is refused, with its place and a way out."""

import collections
import json
import re
import warnings
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.flatten.storage.storage_values import Mode, State
from yobx_flatten import (
    DamagedFileError,
    InvalidArgumentError,
    StaticDataError,
    register_class_flattening,
    unregister_class_flattening,
)
from yobx_flatten.storage.structure import flatten_tree, unflatten_tree, unique


def fake():
    with FakeTensorMode():
        return torch.zeros(2)


class Tagged(torch.Tensor):
    pass


def quietly(make):
    """What torch makes with a warning that it is young (nested, CSR) or old (quantized)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: torch.eye(2).to_sparse(), "tensor.to_dense()"),
        (lambda: torch.eye(2).to_sparse_csr(), "tensor.to_dense()"),
        (lambda: torch.zeros(2, device="meta"), "torch.zeros_like(tensor, device='cpu')"),
        (fake, "torch.zeros(tensor.shape, dtype=tensor.dtype)  # outside its mode"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8), "tensor.dequantize()"),
        (lambda: nested(torch.strided), "list(tensor.unbind())"),
        (lambda: nested(torch.jagged), "list(tensor.unbind())"),
        (lambda: torch.ones(2).as_subclass(Tagged), "tensor.as_subclass(torch.Tensor)"),
    ],
    ids=["sparse", "csr", "meta", "fake", "quantized", "strided", "jagged", "subclass"],
)
def test_the_line_makes_what_can_be_stored(make, line):
    tensor = quietly(make)
    with pytest.raises(InvalidArgumentError) as caught:
        flatten_tree({"a": [tensor]})
    kind = "Tagged, which would come back as a plain tensor" if "subclass" in line else "no plain data to store"
    assert re.match(rf"a\.0 is a .*{kind}", str(caught.value))
    assert str(caught.value).endswith(f". Store instead:\n    {line}")
    flatten_tree({"a": eval(line, {"torch": torch, "tensor": tensor, "list": list})})


def test_parameters_and_buffers_are_stored():
    flatten_tree([torch.nn.Parameter(torch.ones(2)), torch.nn.Buffer(torch.ones(2))])


class Loud:
    def __repr__(self):
        raise RuntimeError("its own business")


def test_what_is_refused_is_not_asked_for_its_repr():
    """A `__repr__` that raises does not hide the message."""
    with pytest.raises(StaticDataError, match="a Loud, whose __repr__ raises RuntimeError at a,"):
        flatten_tree({"a": Loud()})


def test_what_holds_itself_is_refused_with_its_place():
    """It would end in a RecursionError."""
    values = {"x": [torch.ones(1)]}
    values["x"].append(values)
    with pytest.raises(InvalidArgumentError, match=r"^values\['x'\]\[1\] is values itself"):
        flatten_tree(values)


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
        flatten_tree({"a": [array]})


def test_other_leaves_are_refused():
    with pytest.raises(StaticDataError, match=r"generator.* at a\.0"):
        flatten_tree({"a": [(x for x in [])]})


def test_an_array_of_jax_is_refused_with_the_line_to_type():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    with pytest.raises(InvalidArgumentError, match=r"^a is an array of JAX.*\n    numpy\.asarray\(array\)"):
        flatten_tree({"a": jax.numpy.zeros(2)})


def test_a_contiguous_tensor_is_not_copied():
    tensor = torch.zeros(3)
    (payload,) = flatten_tree(tensor).payloads
    tensor += 1
    assert numpy.frombuffer(payload.data(), "float32").tolist() == [1, 1, 1]
    assert payload.nbytes == 12
    payload.data()[:4] = numpy.float32(2.0).tobytes()
    assert tensor.tolist() == [2, 1, 1]


def test_the_json_names_classes_and_leaves():
    found = flatten_tree({"x": torch.ones(2, 3), "state": State(1.5, None, Mode.EVAL)})
    assert found.json == {
        "node": "builtins:dict",
        "static": ["x", "state"],
        "children": [
            {"leaf": "torch", "name": "x", "dtype": "float32", "shape": [2, 3]},
            {
                "node": "tests.flatten.storage.storage_values:State",
                "static": {"!tuple": [{"!enum": ["tests.flatten.storage.storage_values:Mode", "EVAL"]}]},
                "children": [{"leaf": "float", "name": "state.hidden"}, {"leaf": "static", "value": None}],
            },
        ],
    }


def test_the_json_is_json():
    values = {1: float("nan"), (2, "\ud800"): collections.OrderedDict(), None: 2**100}
    json_ = json.loads(json.dumps(flatten_tree({"static only": values}).json))
    assert json_["node"] == "builtins:dict"


def test_a_name_is_given_once():
    taken = set()
    assert [unique(name, taken) for name in ["a", "a", "a#2", "b", "\ud800"]] == ["a", "a#2", "a#2#2", "b", "?"]


@dataclass
class Strict:
    x: Any


def strict_unflatten(children, static):
    if static != "new":
        raise KeyError(static)
    return Strict(*children)


def test_a_registration_that_changed_is_named():
    register_class_flattening(Strict, lambda obj: ([obj.x], "old"), strict_unflatten, None)
    try:
        json_ = flatten_tree(Strict(None)).json
        with pytest.raises(DamagedFileError, match=r"Strict cannot be rebuilt.*KeyError: 'old'.*Register the class"):
            unflatten_tree(json_, None, "cpu")
    finally:
        unregister_class_flattening(Strict)
