"""A nested object as JSON and back; a file chooses neither what is imported nor what is called."""

import dataclasses
import re
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.flatten.storage.storage_values import Mode, State
from yobx_flatten import register_class_flattening, unregister_class_flattening
from yobx_flatten.errors import DamagedFileError, InvalidArgumentError, NotRegisteredError, StaticDataError
from yobx_flatten.storage.structure import flatten_tree, load_trusted, unflatten_tree


@pytest.mark.parametrize(
    "data",
    [
        {"!flag": ["os:system", "touch broken"]},
        {"!flag": ["tests.flatten.storage.test_values:trap", 1]},
        {"!enum": ["os:environ", "HOME"]},
        {"!namedtuple": ["subprocess:Popen", [["touch", "broken"]]]},
        {"!namedtuple": ["builtins:tuple", [1]]},
        {"!config": ["tests.flatten.storage.test_values:Trap", "{}"]},
        {"!dataclass": ["subprocess:Popen", {}]},
        {"!class": "os:system"},
        {"!function": "os:system"},
        {"!function": "builtins:eval"},
        {"!function": "tests.flatten.storage.test_values:sys.exit"},
        {"!function": "torch.serialization:os.system"},
        {"!constant": "os:environ"},
        {"!numpy": ["os:system", "00"]},
        {"!numpy_dtype": "os:system"},
        {"!dtype": "load"},
        {"!dtype": ["float32"]},
        {"!enum": []},
        {"!enum": 3},
        {"!tuple": 3},
        {"!device": "nowhere"},
        {"a": [{"b": {"!flag": ["os:system", "touch broken"]}}]},
        {"!tuple": [{"!flag": ["os:system", "touch broken"]}]},
        {"!no_such_kind": 1},
        {"!class": "logging:FileHandler"},
        {"!class": "tests.flatten.storage.test_values:dataclasses.Field"},  # a name that the module imported
        {"!dataclass": ["tests.flatten.storage.test_values:Ends", {}]},
        {"!config": ["transformers:LlamaConfig", '{"auto_map": {"AutoConfig": "a--b.C"}}']},
        {"!config": ["tests.flatten.storage.test_values:Trap", "[]"]},
        {"!namedtuple": ["tests.flatten.storage.storage_values:Pair", [1]]},
    ],
    ids=repr,
)
def test_a_name_of_another_kind_and_what_could_act_are_refused(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DamagedFileError):
        load_trusted(data)
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_is_not_imported_stays_so(tmp_path, monkeypatch):
    (tmp_path / "a_stranger.py").write_text("raise SystemExit('it was imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    wanted = r"d of the module a_stranger, which is not imported.*\n    import a_stranger"
    with pytest.raises(NotRegisteredError, match=wanted):
        load_trusted({"!enum": ["a_stranger:d", "a"]})
    name = "transformers.models.no_such_model.modeling_no_such_model"  # a known library without the module
    with pytest.raises(NotRegisteredError, match=rf"{name}.*\n    pip install transformers"):
        load_trusted({"!class": f"{name}:Thing"})
    assert "a_stranger" not in sys.modules


@pytest.mark.parametrize(
    "module",
    [
        "numpy.f2py.__main__", "numpy.no_such_part", "torch.utils.bottleneck.__main__", "transformers.commands.serving",
        "transformers.models.llama.convert_llama_weights_to_hf", "transformers.models.llama.modeling_mistral",
        "diffusers.commands.env", "diffusers.models.__main__", "antigravity",
    ],
)  # fmt: skip
def test_no_other_module_is_imported(module):
    """Not even one of a library that is installed: some act when they are imported."""
    with pytest.raises(NotRegisteredError, match="a file cannot cause an import"):
        load_trusted({"!class": f"{module}:Thing"})
    assert module not in sys.modules


@dataclasses.dataclass
class Options:
    mode: str = "a"


class Ends:
    def __del__(self):
        TRACES.append(self)


TRACES = []


@pytest.mark.parametrize("field", ["__class__", "__dict__", "other", "_mode"])
def test_a_dataclass_takes_its_fields_only(field):
    """`__class__` among them would make it an object of any class."""
    name = "tests.flatten.storage.test_values"
    assert load_trusted({"!dataclass": [f"{name}:Options", {"mode": "b"}]}) == Options("b")
    with pytest.raises(DamagedFileError, match=f"{field}.*no such fields"):
        load_trusted({"!dataclass": [f"{name}:Options", {field: {"!class": f"{name}:Ends"}}]})
    assert TRACES == []


def trap(value):
    raise AssertionError("called")


class Trap:
    """No class of configurations: it cannot be stored, only made."""

    @classmethod
    def from_dict(cls, values):
        raise AssertionError("called")


def fake():
    with FakeTensorMode():
        return torch.zeros(2)


class Tagged(torch.Tensor):
    pass


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = make()
    with pytest.raises(InvalidArgumentError) as caught:
        flatten_tree({"a": [tensor]})
    kind = "Tagged, which would come back as a plain tensor" if "subclass" in line else "no plain data to store"
    assert re.match(rf"a\.0 is a .*{kind}", str(caught.value))
    assert str(caught.value).endswith(f". Store instead:\n    {line}")
    flatten_tree({"a": eval(line, {"torch": torch, "tensor": tensor, "list": list})})


class Loud:
    def __repr__(self):
        raise RuntimeError("its own business")


def test_other_leaves_and_what_holds_itself_are_refused_with_their_place():
    """A `__repr__` that raises does not hide the message; a cycle would end in a RecursionError."""
    with pytest.raises(StaticDataError, match="a Loud, whose __repr__ raises RuntimeError at a,"):
        flatten_tree({"a": Loud()})
    with pytest.raises(StaticDataError, match=r"generator.* at a\.0"):
        flatten_tree({"a": [(x for x in [])]})
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


def test_an_array_of_jax_is_refused_with_the_line_to_type():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    with pytest.raises(InvalidArgumentError, match=r"^a is an array of JAX.*\n    numpy\.asarray\(array\)"):
        flatten_tree({"a": jax.numpy.zeros(2)})


def test_a_contiguous_tensor_is_not_copied():
    flatten_tree([torch.nn.Parameter(torch.ones(2)), torch.nn.Buffer(torch.ones(2))])  # both are tensors
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
