"""The largest sizes of an export: on all leaves that vary, below the model's positions, and explained when exceeded."""

import pytest
import torch

from tests.cache_words import WORD
from tests.flatten.export.small_step import cases, inputs, make_step
from tests.models import make_model
from yobx_flatten import (
    Case,
    DecodeSizes,
    DynamicShapesError,
    InvalidArgumentError,
    decode_inputs,
    dynamic_shapes,
    explain_error,
    export_program,
    register_flattening_functions,
)
from yobx_flatten.export.example import Bounds

BOUNDS = {"batch": 4, "length": 12, "new": 5}


@pytest.fixture(scope="module")
def exported():
    return export_program(make_step(), (), inputs(2, 3, 2), bounds=BOUNDS, cases=cases())


def test_every_leaf_has_its_bound(exported):
    fits = inputs(4, 7, 5)
    with torch.no_grad():
        expected = make_step()(**fits)
    torch.testing.assert_close(exported(**fits)["logits"], expected["logits"])
    for above in (inputs(5, 3, 2), inputs(2, 11, 2), inputs(2, 3, 6)):
        with pytest.raises(AssertionError, match="Guard failed"):
            exported(**above)


def test_a_call_above_a_bound_is_explained(exported):
    above = inputs(2, 11, 2)
    with pytest.raises(AssertionError) as caught:
        exported(**above)
    explained = str(explain_error(caught.value, exported.program, (), above))
    assert "is valid only for attention_mask.shape[1] <= 12" in explained
    assert "bounds= or a Dim set the range" in explained


def test_cases_above_the_bounds_are_left_out():
    larger = [Case("12 tokens", (), inputs(2, 10, 2), steps=2), Case("a row too many", (), inputs(5, 3, 2), steps=1)]
    fitting = Case("as long as can be", (), inputs(2, 8, 2), steps=2)
    report = export_program(make_step(), (), inputs(2, 3, 2), bounds=BOUNDS, cases=[*larger, fitting]).report
    assert [case.case for case in report.cases] == ["the example", "as long as can be"]
    assert report.remarks == ["2 cases were left out: they are larger than the bounds."]


def test_caches_masks_and_tokens_have_bounds_of_their_own():
    given = decode_inputs(make_model("llama"), DecodeSizes(2, 5, 3))
    specs = Bounds.of({"batch": 4, "length": 64, "new": 16}).on(given, dynamic_shapes(given))
    assert [dim.max for dim in specs["input_ids"].values()] == [4, 16]
    assert [dim.max for dim in specs["attention_mask"].values()] == [4, 64]
    assert [[dim.max for dim in leaf.values()] for leaf in specs[WORD]] == [[4, 64]] * 4


def test_calls_with_a_cache_are_measured_inside_and_outside_the_block():
    model, bounds = make_model("llama"), Bounds.of({"batch": 4, "length": 12})
    given = decode_inputs(model, DecodeSizes(2, 5, 3))
    specs = bounds.on(given, dynamic_shapes(given))
    with register_flattening_functions(patch_transformers=True):
        assert bounds.holds(given, specs, steps=2)
    assert bounds.holds(given, specs, steps=2)
    assert not bounds.holds(given, specs, steps=3)
    assert not bounds.holds(decode_inputs(model, DecodeSizes(2, 12, 1)), specs)
    assert not bounds.holds(decode_inputs(model, DecodeSizes(5, 5, 3)), specs)


@pytest.mark.parametrize("bounds", [{"rows": 4}, {"batch": 0}, {"length": 8.0}, {}])
def test_what_is_not_a_bound_is_refused(bounds):
    with pytest.raises(InvalidArgumentError, match="bounds: expected a dict of ints, such as"):
        export_program(make_step(), (), inputs(2, 3, 2), bounds=bounds)


def test_an_example_above_a_bound_is_refused_before_the_trace():
    message = r"attention_mask\.axis 1: size 5 of the example is above the bound 4 of 'length'"
    with pytest.raises(DynamicShapesError, match=message) as caught:
        export_program(make_step(), (), inputs(2, 3, 2), bounds={"length": 4})
    assert str(caught.value).endswith('bounds={"length": 5}')


def test_a_length_above_the_positions_of_a_model_is_refused():
    model = make_model("llama")
    most = model.config.max_position_embeddings
    given = decode_inputs(model, DecodeSizes(2, 5, 3))
    with pytest.raises(DynamicShapesError, match=f"is above the {most} positions of LlamaForCausalLM") as caught:
        export_program(model, (), given, bounds={"batch": 4, "length": most + 1, "new": 16})
    assert str(caught.value).endswith(f"bounds={{'batch': 4, 'length': {most}, 'new': 16}}")


class Features(torch.nn.Module):
    """Frames and their features, as a spectrogram has them; one of both may be fixed by the weights."""

    def __init__(self, wide):
        super().__init__()
        self.head = torch.nn.Linear(9, 3) if wide else None

    def forward(self, features):
        return features.sum(2) if self.head is None else self.head(features)


def test_a_fixed_axis_needs_no_room_below_the_bound():
    """Nine features, which the weights fix, in an export of at most eight tokens."""
    exported = export_program(Features(wide=True), (), {"features": torch.randn(2, 3, 9)}, bounds={"length": 8})
    assert exported.report.ok
    with pytest.raises(AssertionError, match="Guard failed"):
        exported(features=torch.randn(2, 9, 9))


def test_an_axis_that_varies_above_the_bound_is_refused():
    with pytest.raises(DynamicShapesError, match=r"features\.axis 2: size 9 of the example is above the bound 8"):
        export_program(Features(wide=False), (), {"features": torch.randn(2, 3, 9)}, bounds={"length": 8})
