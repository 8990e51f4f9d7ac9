"""What an export is given by mistake is refused with its place; named tuples and other containers are taken."""

import dataclasses
import operator
import re
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from torch.export import Dim

from tests.models import make_model
from tests.modules import module_class, module_of
from yobx_flatten import (
    Case,
    DecodeSizes,
    check_dynamic_shapes,
    decode_inputs,
    dynamic_shapes,
    export_onnx,
    export_program,
    record_calls,
    register,
    unregister_class_flattening,
)
from yobx_flatten.errors import DynamicShapesError, InvalidArgumentError, NotRegisteredError

Scale = module_class("Scale", lambda self, x, by=None: x if by is None else x * by)


class Opaque:
    """A class that nobody registers."""


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((len, (X,)), r"module: expected a torch\.nn\.Module, found the builtin_"),
        ((Scale(), X), r"args: expected a tuple .* found the Tensor .*\n    args=\(x,\)"),
        ((Scale(), (), [X]), r"kwargs: expected a dict .* found the list"),
        ((Scale(), (X,), {"to": X}), r"Scale\.forward .* 'to'\. Its parameters are x, by\."),
        ((Scale(),), r"Scale\.forward cannot be called .* missing .* 'x'"),
    ],
)
def test_what_is_no_module_or_does_not_fit_its_forward_is_refused(given, message):
    with pytest.raises(InvalidArgumentError, match=message):
        export_program(*given)
    with pytest.raises(InvalidArgumentError, match=r"cases\[0\]: expected a Case, found the dict(.|\n)*cases=\[Case\("):
        export_program(Scale(), (X,), cases=[{"x": 1}])
    opaque = r"by\['deep'\]\[1\] is a .*Opaque, .*\n    register_class_flattening\(Opaque,"
    with pytest.raises(NotRegisteredError, match=opaque):
        export_program(Scale(), (X,), {"by": {"deep": [X, Opaque()]}})


@pytest.mark.parametrize("place", ["x", "x[0]"])
def test_a_call_with_an_array_prints_the_line_that_converts_it(place):
    """torch states that an integer cannot be called."""

    takes = module_class("Takes", lambda self, x: (x[0] if place == "x[0]" else x) * 2)()
    array = torch.full((5, 3), 2.0).numpy()
    exported = export_program(takes, ([X] if place == "x[0]" else X,))
    given = [array] if place == "x[0]" else array
    with pytest.raises(NotRegisteredError, match=rf"{re.escape(place)} is a numpy\.ndarray.*Pass a tensor") as caught:
        exported(given)
    tensor = eval(str(caught.value).splitlines()[-1], {"torch": torch, "x": given})
    assert torch.equal(exported([tensor] if place == "x[0]" else tensor), torch.full((5, 3), 4.0))


def test_a_single_case_is_a_list_of_one():
    case = Case("five rows", (torch.ones(5, 3),))
    given, listed = (export_program(Scale(), (X,), cases=cases) for cases in (case, [case]))
    assert [found.case for found in given.report.cases] == ["the example", "five rows"]
    assert given.report.input_names == listed.report.input_names


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ("all", r'dynamic_shapes: expected "auto", None, or a dict with the keys \[\'x\'\], found the str'),
        (({}, {}), r"dynamic_shapes: found 2 entries for 1 inputs, \['x'\]"),
        ({"y": None}, r"the keys of the inputs, \['x'\]\. Missing: \[\]; unknown: \['y'\]"),
    ],
)
def test_dynamic_shapes_that_name_other_inputs_are_refused(shapes, message):
    with pytest.raises(DynamicShapesError, match=message):
        export_program(Scale(), (X,), dynamic_shapes=shapes)


def test_another_error_of_the_trace_stays_as_it_is():
    """A `ValueError` of the model is not ours to explain."""

    class Refuses(torch.nn.Module):
        def forward(self, x):
            raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        export_program(Refuses(), (X,))


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"past": -1}, {"new": 0}, {"padding": -1}, {"source": 2.0}])
def test_sizes_that_no_call_can_have_are_refused(wrong):
    with pytest.raises(InvalidArgumentError, match=f"DecodeSizes: {next(iter(wrong))} must be an int of"):
        DecodeSizes(**wrong)
    with pytest.raises(InvalidArgumentError, match=r"no tokens to fill the cache with \(batch 2, past 0, new 3\)"):
        decode_inputs(make_model("llama"), DecodeSizes(past=0))
    with pytest.raises(InvalidArgumentError, match=r"Scale is not a Hugging Face model(.|\n)*cases=\[Case\("):
        decode_inputs(Scale(), DecodeSizes())


VARIES = {0: Dim.AUTO, 1: Dim.AUTO}


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Holder:
    pair: Any


def adds(find):
    return module_of(lambda self, given: operator.add(*find(given)))


def _pair(rows: int) -> Pair:
    return Pair(torch.ones(rows, 3), torch.full((rows, 3), float(rows)))


def _default(rows: int):
    found = defaultdict(list)
    found["x"], found["y"] = _pair(rows)
    return found


INPUTS = {
    "a named tuple": (lambda rows: _pair(rows), lambda given: (given.x, given.y)),
    "in a dataclass": (lambda rows: Holder(_pair(rows)), lambda given: (given.pair.x, given.pair.y)),
    "in a dict and a list": (lambda rows: {"a": [_pair(rows)]}, lambda given: (given["a"][0].x, given["a"][0].y)),
    "what torch returns": (lambda rows: torch.max(torch.rand(rows, 3, 4), dim=1), lambda given: (given[0], given[1])),
    "an ordered dict": (lambda rows: OrderedDict(_pair(rows)._asdict()), lambda given: (given["x"], given["y"])),
    "a default dict": (_default, lambda given: (given["x"], given["y"])),
    "a deque": (lambda rows: deque(_pair(rows), 2), lambda given: (given[0], given[1])),
}


@pytest.fixture(autouse=True)
def registered():
    register(Holder)
    yield
    unregister_class_flattening(Holder)


@pytest.mark.parametrize("kind", INPUTS)
def test_an_export_takes(kind):
    make, find = INPUTS[kind]
    given = make(2)
    check_dynamic_shapes((given,), dynamic_shapes((given,)))
    exported = export_program(adds(find), (given,), cases=[Case("five", (make(5),))])
    assert exported.report.ok
    other = make(7)
    assert torch.equal(exported(other), sum(find(other)))


@pytest.mark.parametrize("kind", ["a named tuple", "in a dataclass", "in a dict and a list"])
def test_so_do_an_onnx_file_and_recorded_calls(kind, tmp_path):
    make, find = INPUTS[kind]
    module = adds(find)
    cases = [Case("five", (make(5),))]
    assert export_onnx(module, (make(2),), path=tmp_path / "pair.onnx", cases=cases).report.ok
    with record_calls(module) as calls:
        module(make(2))
        module(make(4))
    shapes = calls.dynamic_shapes()
    exported = export_program(calls.module(), kwargs=calls.example(), dynamic_shapes=shapes, cases=[])
    assert calls.replay(exported)


def test_the_specification_has_the_type_that_torch_wants():
    """The tuple's own, also in a registered class, which itself stands as a list."""
    assert dynamic_shapes((_pair(2),)) == (Pair(VARIES, VARIES),)
    (written,) = dynamic_shapes((Holder(_pair(2)),))
    assert type(written) is list
    assert type(written[0]) is Pair
    assert dynamic_shapes(({"size": torch.Size([2, 3])},)) == ({"size": (None, None)},)
    expands = module_class("Expands", lambda self, x, size: x.expand(size))()
    exported = export_program(expands, (torch.ones(3), torch.Size([2, 3])), cases=[])
    assert exported(torch.ones(3), torch.Size([2, 3])).shape == (2, 3)


@pytest.mark.parametrize(
    ("given", "shapes", "message"),
    [
        (_pair(2), [VARIES, VARIES], r"given: expected a Pair with 2 entries for \['x', 'y'\], found \["),
        ((1, 2), [None, None], "given: expected a tuple with 2 entries"),
        ([1, 2], (None, None), "given: expected a list with 2 entries"),
    ],
)
def test_another_container_is_refused_by_path(given, shapes, message):
    with pytest.raises(DynamicShapesError, match=message):
        check_dynamic_shapes({"given": given}, {"given": shapes})
