"""What an export is given by mistake: each is refused before a trace, with the place and the line to type."""

import re

import pytest
import torch

from tests.models import make_model
from yobx_flatten import (
    Case,
    DecodeSizes,
    DynamicShapesError,
    InvalidArgumentError,
    NotRegisteredError,
    decode_inputs,
    export_program,
)


class Scale(torch.nn.Module):
    def forward(self, x, by=None):
        return x if by is None else x * by


class Opaque:
    """A class that nobody registers."""


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param((Scale, (X,)), r"module: expected .* found .*Scale\. Make an instance: Scale\(", id="a class"),
        pytest.param((len, (X,)), r"module: expected a torch\.nn\.Module, found the builtin_", id="a function"),
        pytest.param((Scale(), X), r"args: expected a tuple .* found the Tensor .*\n    args=\(x,\)", id="args"),
        pytest.param((Scale(), (), [X]), r"kwargs: expected a dict .* found the list", id="kwargs"),
        pytest.param((Scale(), (X,), {"to": X}), r"Scale\.forward .* 'to'\. Its parameters are x, by\.", id="name"),
        pytest.param((Scale(),), r"Scale\.forward cannot be called .* missing .* 'x'", id="nothing"),
    ],
)
def test_what_is_no_module_or_does_not_fit_its_forward_is_refused(given, message):
    with pytest.raises(InvalidArgumentError, match=message):
        export_program(*given)


def test_a_case_must_be_a_case():
    with pytest.raises(InvalidArgumentError, match=r"cases\[0\]: expected a Case, found the dict(.|\n)*cases=\[Case\("):
        export_program(Scale(), (X,), cases=[{"x": 1}])


@pytest.mark.parametrize("place", ["x", "x[0]"])
def test_a_call_with_an_array_prints_the_line_that_converts_it(place):
    """torch states that an integer cannot be called."""

    class Takes(torch.nn.Module):
        def forward(self, x):
            return (x[0] if place == "x[0]" else x) * 2

    array = torch.full((5, 3), 2.0).numpy()
    exported = export_program(Takes(), ([X] if place == "x[0]" else X,))
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


def test_an_object_that_torch_refuses_is_named_by_its_place_and_the_line_that_registers_it():
    """torch names the class only."""
    with pytest.raises(
        NotRegisteredError, match=r"by\['deep'\]\[1\] is a .*Opaque, .*\n    register_class_flattening\(Opaque,"
    ):
        export_program(Scale(), (X,), {"by": {"deep": [X, Opaque()]}})


def test_another_error_of_the_trace_stays_as_it_is():
    """A `ValueError` of the model is not ours to explain."""

    class Refuses(torch.nn.Module):
        def forward(self, x):
            raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        export_program(Refuses(), (X,))


def test_inputs_are_made_for_models_of_transformers_only():
    with pytest.raises(InvalidArgumentError, match=r"Scale is not a Hugging Face model(.|\n)*cases=\[Case\("):
        decode_inputs(Scale(), DecodeSizes())


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"past": -1}, {"new": 0}, {"padding": -1}, {"source": 2.0}])
def test_sizes_that_no_call_can_have_are_refused(wrong):
    with pytest.raises(InvalidArgumentError, match=f"DecodeSizes: {next(iter(wrong))} must be an int of"):
        DecodeSizes(**wrong)


def test_a_cache_is_not_filled_with_nothing():
    with pytest.raises(InvalidArgumentError, match=r"no tokens to fill the cache with \(batch 2, past 0, new 3\)"):
        decode_inputs(make_model("llama"), DecodeSizes(past=0))
