"""``dynamic_shapes`` as ``torch.fx.experimental.dynamic_spec`` states them."""

from __future__ import annotations

import re

import onnx
import pytest
import torch
from torch.export import Dim

from tests.cache_words import WORD
from tests.models import make_model
from tests.modules import module_class
from yobx_flatten import Case, DecodeSizes, decode_inputs, export_onnx, export_program, register_flattening_functions
from yobx_flatten.diagnose.checks import check_inputs
from yobx_flatten.errors import DynamicShapesError, ReplayError
from yobx_flatten.runners.open import open_runner

specs = pytest.importorskip("torch.fx.experimental.dynamic_spec", reason="an older torch has no dynamic_spec")
if not hasattr(specs, "SeqSpec"):
    pytest.skip("an older torch has other classes in dynamic_spec", allow_module_level=True)
torch_takes_them = pytest.mark.skipif(
    not hasattr(specs, "dynamic_spec"), reason="torch.export takes no dynamic_spec before torch 2.15"
)
DictSpec, IntVar, ObjectSpec, ParamsSpec = specs.DictSpec, specs.IntVar, specs.ObjectSpec, specs.ParamsSpec
SeqSpec, ShapesSpec, ShapeVar, STATIC = specs.SeqSpec, specs.ShapesSpec, specs.ShapeVar, specs.STATIC
TensorSpec = specs.TensorSpec
Adds = module_class("Adds", lambda self, x, y: x.sum(0) + y.sum(0))


class Nested(torch.nn.Module):
    def forward(self, parts, n, *more, **named):
        found = parts["a"].sum() * n + parts["list"][0].sum() + parts["list"][1].sum()
        return found + sum(one.sum() for one in more) + named["z"].sum() + named["w"].sum()


def _tensors(first, second):
    return torch.ones(first, 4), torch.ones(second, 4)


def test_a_variable_on_two_axes_makes_them_equal_within_its_range_in_every_form_of_a_spec():
    batch = ShapeVar("batch", max=64)
    spec = ParamsSpec({"x": TensorSpec([batch, STATIC]), "y": TensorSpec([batch, 4])})
    exported = export_program(Adds(), _tensors(3, 3), dynamic_shapes=spec, cases=[Case("7", _tensors(7, 7))])
    assert exported.report.ok
    assert [bound.upper for bound in exported.program.range_constraints.values()] == [64]
    for first, second in ((7, 6), (65, 65)):
        with pytest.raises(Exception, match=r"Guard failed|assertion failed"):
            exported(*_tensors(first, second))
    batch = ShapeVar("batch", min=3, max=9)
    params = {"x": TensorSpec([batch, None]), "y": TensorSpec([batch, None])}
    found = [
        export_program(Adds(), _tensors(4, 4), dynamic_shapes=spec).program.range_constraints
        for spec in (ShapesSpec(params), ParamsSpec(params), params)
    ]
    assert [[(bound.lower, bound.upper) for bound in one.values()] for one in found] == [[(3, 9)]] * 3


@pytest.mark.parametrize("strict", [False, True])  # a strict trace goes through dynamo
def test_expressions_and_assumptions_are_asserted_by_the_program(strict):
    batch = ShapeVar("batch")
    spec = ShapesSpec(
        {"x": TensorSpec([batch, STATIC]), "y": TensorSpec([batch * 2 + 1, STATIC])}, assumptions=[batch % 2 == 0]
    )
    cases = [Case("6", _tensors(6, 13))]
    exported = export_program(Adds(), _tensors(4, 9), dynamic_shapes=spec, strict=strict, cases=cases)
    assert exported.report.ok
    for first, second in ((6, 12), (5, 11)):
        with pytest.raises(RuntimeError, match="assertion failed"):
            exported(*_tensors(first, second))
    # A + B, of which a Dim knows nothing
    joins = module_class("Joins", lambda self, x, y, both: x.sum() + y.sum() + both.sum())()
    a, b = ShapeVar("a"), ShapeVar("b")
    spec = ParamsSpec({"x": TensorSpec([a]), "y": TensorSpec([b]), "both": TensorSpec([a + b])})
    exported = export_program(joins, tuple(map(torch.ones, (2, 3, 5))), dynamic_shapes=spec, strict=strict)
    assert exported(*map(torch.ones, (4, 3, 7))) == 14
    with pytest.raises(RuntimeError, match="assertion failed"):
        exported(*map(torch.ones, (4, 3, 8)))


def _nested(a, b, c, d, n):
    return ({"a": torch.ones(a), "list": [torch.ones(2), torch.ones(b)]}, n, torch.ones(c), torch.ones(3)), {
        "z": torch.ones(d),
        "w": torch.ones(2),
    }


@pytest.mark.parametrize("by_name", [True, False])
def test_containers_numbers_and_varying_arguments_have_their_specs(by_name):
    seq = SeqSpec([STATIC, TensorSpec([ShapeVar("b")])])
    named = {"z": TensorSpec([ShapeVar("d")])}
    spec = ParamsSpec(
        {
            "parts": DictSpec({"a": TensorSpec([ShapeVar("a")]), "list": seq}),
            "n": IntVar("n", min=3, max=8),
            "*args": [TensorSpec([ShapeVar("c")])],
            **(named if by_name else {"**kwargs": named}),
        }
    )
    args, kwargs = _nested(3, 4, 5, 6, 7)
    exported = export_program(Nested(), args, kwargs, dynamic_shapes=spec)
    args, kwargs = _nested(4, 5, 6, 7, 8)
    assert exported(*args, **kwargs) == Nested()(*args, **kwargs)
    for wrong in (_nested(4, 5, 6, 7, 9), _nested(4, 5, 6, 7, 2)):
        with pytest.raises(Exception, match=r"Guard failed|assertion failed"):
            exported(*wrong[0], **wrong[1])
    kwargs["w"] = torch.ones(3)
    with pytest.raises(Exception, match="Guard failed"):
        exported(*args, **kwargs)


@pytest.mark.parametrize("container", [ObjectSpec, DictSpec])
@pytest.mark.parametrize(
    ("sliding", "stated"),
    [(False, True), (False, False), (True, False)],  # a window is shorter than the mask, past a certain length
)
def test_a_cache_has_a_spec_by_the_names_of_its_children(container, sliding, stated):
    model = make_model("mistral" if sliding else "llama")
    inputs = decode_inputs(model, DecodeSizes(batch=2, past=5, new=3))
    batch, past, new = ShapeVar("batch", max=16), ShapeVar("past"), ShapeVar("new")
    layer = TensorSpec([batch, STATIC, past, STATIC])
    names = [f"{part}{'_W8' if sliding else ''}_{number}" for number in (0, 1) for part in ("key", "value")]
    spec = ParamsSpec(
        {
            "input_ids": TensorSpec([batch, new]),
            "attention_mask": TensorSpec([batch, past + new if stated else ShapeVar("total")]),
            "past_key_values": container(dict.fromkeys(names, layer)),  # the word of versions before 5.24
        }
    )
    exported = export_program(model, (), inputs, dynamic_shapes=spec)
    assert len(exported.report.cases) > 3
    assert exported.report.ok


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (lambda v: ObjectSpec({"keys_0": TensorSpec([v, None, None, None])}), r"has the entries \['keys_0'\].*'key_0'"),
        (lambda v: SeqSpec([TensorSpec([v, None, None, None])]), r"expected an ObjectSpec .*'key_0'.*found SeqSpec"),
        (lambda v: TensorSpec([v, None, None, None]), r"expected an ObjectSpec .*found TensorSpec"),
        (lambda v: ObjectSpec({"key_0": TensorSpec([v])}), r"key_0: expected one entry for each of the 4 axes"),
        (lambda v: ObjectSpec({"key_0": v}), r"key_0: the entry v is for an integer, found"),
    ],
)
def test_a_spec_that_does_not_fit_a_cache_is_refused_with_its_children(entry, said):
    model = make_model("llama")
    inputs = decode_inputs(model, DecodeSizes(batch=2, past=5, new=3))
    with pytest.raises(DynamicShapesError, match=f"{WORD}.*{said}"):
        export_program(model, (), inputs, dynamic_shapes=ParamsSpec({WORD: entry(ShapeVar("v"))}))


def test_torch_export_inside_the_block_refuses_a_spec_for_a_cache_and_names_what_takes_it():
    """torch finds children by names of attributes; a cache has keys, and ``export_program`` takes them."""
    model = make_model("llama")
    inputs = decode_inputs(model, DecodeSizes(batch=2, past=5, new=3))
    spec = ParamsSpec({WORD: ObjectSpec({"key_0": TensorSpec([ShapeVar("v"), None, None, None])})})
    with (
        register_flattening_functions(patch_transformers=True),
        pytest.raises(DynamicShapesError, match=rf"{WORD}: .*'key_0'.*export_program"),
    ):
        torch.export.export(model, (), dict(inputs), dynamic_shapes=spec)


@torch_takes_them
def test_torch_export_inside_the_block_takes_a_spec_of_tensors():
    batch = ShapeVar("batch")
    spec = ParamsSpec({"x": TensorSpec([batch, STATIC]), "y": TensorSpec([batch, STATIC])})
    with register_flattening_functions():
        program = torch.export.export(Adds(), _tensors(1, 1), dynamic_shapes=spec)
        assert program.module()(*_tensors(5, 5)).tolist() == [10.0] * 4


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: {"x": TensorSpec([ShapeVar("b")])}, "x: expected one entry for each of the 2 axes"),
        (lambda: {"x": TensorSpec([None, 5])}, "x: axis 1 must be 5 by the specification, but is 4 in the example"),
        (lambda: {"x": TensorSpec([ShapeVar("b", min=5), None])}, "x: axis 0 is 4 in the example, but b must be at l"),
        (lambda: {"x": TensorSpec([ShapeVar("b", max=3), None])}, "at least 0, at most 3"),
        (lambda: {"x": TensorSpec([ShapeVar("b") * 2, None])}, r"x: axis 0: 2\*b depends on \['b'\]"),
        (lambda: {"x": DictSpec({"a": None})}, "x: found a DictSpec for torch.Tensor, which has no children"),
        (lambda: {"x": IntVar("n")}, "x: the entry n is for an integer, found torch.Tensor"),
        (lambda: {"z": TensorSpec([None])}, r"unknown: \['z'\]"),
    ],
)
def test_a_spec_that_does_not_fit_says_where(make, said):
    for spec in (make(), ParamsSpec(make()), ShapesSpec(make())):
        with pytest.raises(DynamicShapesError, match=said):
            export_program(Adds(), _tensors(4, 4), dynamic_shapes=spec)
        assert any(re.search(said, finding.text) for finding in check_inputs(Adds(), _tensors(4, 4), None, spec))


def test_an_example_that_breaks_a_spec_is_refused():
    """torch takes the first, and makes a program that refuses its own example."""
    batch = ShapeVar("batch")
    same = ParamsSpec({"x": TensorSpec([batch, None]), "y": TensorSpec([batch, None])})
    with pytest.raises(DynamicShapesError, match=r"y: axis 0 is 5 in the example, but x: axis 0 is 4\. Both .* batch"):
        export_program(Adds(), _tensors(4, 5), dynamic_shapes=same)
    params = {"x": TensorSpec([batch, None]), "y": TensorSpec([batch + 2, None])}
    with pytest.raises(DynamicShapesError, match=r"y: axis 0: .*\{'batch': 4\}, batch \+ 2 is 6, but the size is 5"):
        export_program(Adds(), _tensors(4, 5), dynamic_shapes=params)
    with pytest.raises(DynamicShapesError, match=r"assumptions: in the example, .*\{'batch': 4\}, .* does not hold"):
        export_program(Adds(), _tensors(4, 6), dynamic_shapes=ShapesSpec(params, assumptions=[batch > 4]))
    with pytest.raises(DynamicShapesError, match=r"x: axis 0 should vary, but has size 1"):
        export_program(Adds(), _tensors(1, 1), dynamic_shapes={"x": TensorSpec([ShapeVar(), None])})


def test_entries_of_both_kinds_stand_next_to_each_other_and_no_size_is_fixed_without_a_word():
    mixed = {"x": TensorSpec([ShapeVar("b"), None]), "y": {0: Dim.DYNAMIC}}
    assert export_program(Adds(), _tensors(4, 5), dynamic_shapes=mixed)(*_tensors(6, 7)).tolist() == [13.0] * 4
    # as torch promises of a spec: a size that the code fixes is an error
    fixes = module_class("Fixes", lambda self, x: x + torch.ones(4, 4))()
    with pytest.raises(Exception, match=r"x\.shape\[0\] should vary, but the code works for size 4 only"):
        export_program(fixes, (torch.ones(4, 4),), dynamic_shapes={"x": TensorSpec([ShapeVar(), None])})


@torch_takes_them
def test_the_decorator_is_followed_where_no_shapes_are_passed():
    class Decorated(torch.nn.Module):
        @specs.dynamic_spec({"x": TensorSpec([ShapeVar("b", max=9), STATIC])})
        def forward(self, x):
            return x * 2

    module = Decorated()
    exported = export_program(module, (torch.ones(4, 3),))
    assert [bound.upper for bound in exported.program.range_constraints.values()] == [9]
    assert "forward" not in vars(module)
    assert export_program(module, (torch.ones(4, 3),), dynamic_shapes=None).program.range_constraints == {}
    with pytest.raises(DynamicShapesError, match="declares its shapes with @dynamic_spec"):
        export_program(module, (torch.ones(4, 3),), dynamic_shapes={"x": {0: Dim.AUTO}})


def test_a_file_has_the_names_of_the_variables_and_states_what_they_are(tmp_path):
    rows, width, other = ShapeVar("rows"), ShapeVar("width"), ShapeVar("width")

    sums = module_class("Sums", lambda self, x, y: x.sum(0).sum() + y.sum())()
    spec = ParamsSpec({"x": TensorSpec([rows, width]), "y": TensorSpec([rows * 2, other])})
    export_onnx(sums, (torch.ones(3, 4), torch.ones(6, 5)), path=tmp_path / "sums.onnx", dynamic_shapes=spec)
    inputs = {value.name: value.type.tensor_type.shape.dim for value in onnx.load(tmp_path / "sums.onnx").graph.input}
    assert [axis.dim_param for axis in inputs["x"]] == ["rows", "width"]
    assert inputs["y"][1].dim_param == "width_1"
    runner = open_runner(tmp_path / "sums.onnx")
    assert runner.run({"x": torch.ones(4, 4), "y": torch.ones(8, 5)})
    with pytest.raises(ReplayError, match=r"y has size 7 in axis 0, and sums.onnx takes 8 there"):
        runner.run({"x": torch.ones(4, 4), "y": torch.ones(7, 5)})
