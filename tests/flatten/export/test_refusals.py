"""What an export refuses, or does without, and says so: modules as inputs, weights elsewhere, sizes as static data."""

import dataclasses
import importlib.util
from typing import Any

import accelerate
import pytest
import torch
from torch.export import Dim

from yobx_flatten import (
    DynamicShapesError,
    InvalidArgumentError,
    NotRegisteredError,
    StaticDataError,
    check_dynamic_shapes,
    check_inputs,
    export_onnx,
    export_program,
    register,
    register_class_flattening,
    unregister_class_flattening,
)

X = torch.ones(2, 3)


class Calls(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, given):
        return self.function(given)


@dataclasses.dataclass
class Images:
    x: Any
    sizes: Any = dataclasses.field(default=(), metadata={"static": True})


@dataclasses.dataclass
class Holder:
    x: Any
    part: Any


class ByHand:
    def __init__(self, x, sizes) -> None:
        self.x, self.sizes = x, sizes


@pytest.fixture(autouse=True)
def registered():
    register(Images)
    register(Holder)
    register_class_flattening(ByHand, lambda o: ([o.x], {"s": [o.sizes]}), lambda c, s: ByHand(*c, s["s"][0]), None)
    yield
    for cls in (Images, Holder, ByHand):
        unregister_class_flattening(cls)


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda x: Images(x + 1, [(x.shape[0], 3)]), r"Images\.sizes\[0\]\[0\], a dynamic size"),
        (lambda x: ByHand(x + 1, x.shape[0]), r"of ByHand holds \S+ at static\['s'\]\[0\], a size that varies"),
    ],
)  # fmt: skip
def test_a_size_of_the_trace_is_no_static_data(make, place):
    """A program has one static part; the size of the example would stay in it."""
    with pytest.raises(StaticDataError, match=rf"{place}.*among the children"):
        export_program(Calls(make), (X,), cases=[])


class Carrier(torch.nn.Module):
    def __init__(self, x) -> None:
        super().__init__()
        self.x = x


def test_a_module_among_the_inputs_is_refused_by_path():
    with pytest.raises(NotRegisteredError, match=r"(?s)given\.part is a module \(.*Linear\).*self\.part = part"):
        export_program(Calls(lambda h: h.part(h.x)), (Holder(X, torch.nn.Linear(3, 3)),))
    with pytest.raises(NotRegisteredError, match=r"(?s)given is a .*Carrier.*register\(Carrier, children=\['x'\]\)"):
        export_program(Calls(lambda c: c.x + 1), (Carrier(X),))


class Result:
    def __init__(self, x) -> None:
        self.x = x


def test_an_output_of_an_unregistered_class_is_refused_with_the_line():
    with pytest.raises(NotRegisteredError, match=r"(?s)output is a .*Result.*register\(Result, children=\['x'\]\)"):
        export_program(Calls(lambda x: Result(x + 1)), (X,))


def test_a_float_does_not_vary():
    """torch takes a Dim for an int only."""
    with pytest.raises(DynamicShapesError, match=r"f: expected None for the float 1\.5"):
        check_dynamic_shapes({"f": 1.5}, {"f": Dim.DYNAMIC})
    check_dynamic_shapes({"n": 3}, {"n": Dim.DYNAMIC})


def test_inputs_on_another_device_are_named():
    module, given = torch.nn.Linear(3, 4), torch.ones(2, 3, device="meta")
    (warning,) = check_inputs(module, (given,))
    assert "input is on meta, the weights are on cpu" in str(warning)
    with pytest.raises(
        InvalidArgumentError, match=r"input is on meta, the weights are on cpu.*\n    input.to\('cpu'\)"
    ):
        export_program(module, (given,))
    assert not check_inputs(module, (X,))


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_offloaded_weights_are_named_before_a_plain_export():
    """`export_program` brings them; `torch.export` finds none, and `check_inputs` states the line that brings them."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    accelerate.cpu_offload(module, torch.device("cpu"))
    (warning,) = check_inputs(module, (X,))
    assert "weights of 0 (Linear) are offloaded" in str(warning)
    assert "accelerate.hooks.remove_hook_from_module(module, recurse=True)" in str(warning)
    accelerate.hooks.remove_hook_from_module(module, recurse=True)
    assert not check_inputs(module, (X,))


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="onnxscript is not installed")
def test_numbers_alone_are_replaced_by_tensors_as_the_line_states(tmp_path):
    """Without an input, torch's exporter finds no tensor at all."""
    module = Calls(lambda given: [item * 2 for item in given])
    with pytest.raises(InvalidArgumentError, match="No input is a tensor") as caught:
        export_onnx(module, ([1.5, 2.5],), path=tmp_path / "model.onnx")
    tensor = eval(str(caught.value).splitlines()[-1], {"torch": torch})
    exported = export_onnx(module, ([tensor, tensor + 1],), path=tmp_path / "model.onnx")
    assert exported.report.ok
    assert [float(one) for one in exported([tensor + 2, tensor + 3])] == [7.0, 9.0]


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="onnxscript is not installed")
def test_sizes_are_not_named_where_fixing_them_does_not_help(tmp_path):
    """torch's exporter refuses a branch that returns a view of its input, with sizes that vary and without."""
    module = Calls(lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.view(-1).view(2, 3), (x,)))
    with pytest.raises(InvalidArgumentError, match="aliasing") as caught:
        export_onnx(module, (X,), path=tmp_path / "model.onnx")
    assert "sizes" not in str(caught.value)
    line = str(caught.value).splitlines()[-1]
    exported = eval(line, {"export_program": export_program, "module": module, "args": (X,), "kwargs": {}})
    torch.testing.assert_close(exported(X), X.sin())
    torch.testing.assert_close(exported(-X), -X)
