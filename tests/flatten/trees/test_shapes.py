"""`dynamic_shapes` written from the inputs, and checked before torch sees them."""

import dataclasses

import pytest
import torch
from torch.export import Dim
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticLayer

from tests.cache_words import WORD, cache_of
from tests.models import make_model, start
from yobx_flatten import (
    DecodeSizes,
    DynamicShapesError,
    InvalidArgumentError,
    check_dynamic_shapes,
    decode_inputs,
    dynamic_shapes,
    make_dynamic_shapes_kv_cache,
    make_flattening_function_for_dataclass,
    register_class_flattening,
    register_flattening_functions,
    unregister_class_flattening,
)

AUTO = Dim.AUTO
# before 5.10 or so transformers hands the positions to a static layer, which does not count itself
HAS_POSITION = hasattr(StaticLayer(4), "cumulative_length")


def test_plain_inputs_vary_along_every_axis_and_numbers_do_not():
    inputs = {"x": torch.zeros(2, 3), "many": [torch.zeros(4), (1, "a", None)], "flag": True, "scalar": torch.tensor(1)}
    assert dynamic_shapes(inputs) == {
        "x": {0: AUTO, 1: AUTO},
        "many": [{0: AUTO}, (None, None, None)],
        "flag": None,
        "scalar": {},
    }


def test_a_cache_varies_in_batch_and_length_only():
    keys = {0: AUTO, 2: AUTO}
    assert dynamic_shapes({"c": start("gemma3").cache}) == {"c": [keys] * 6}
    assert dynamic_shapes({"c": start("mistral").cache}) == {"c": [*[keys] * 4, {}]}


def test_a_static_cache_varies_in_batch_only():
    """Its length is fixed by configuration; the tensor it counts with has no axis."""
    shapes = dynamic_shapes({"c": start("llama", static=True).cache})
    assert shapes == {"c": [{0: AUTO}, {0: AUTO}, *([{}] if HAS_POSITION else [])] * 2}


@pytest.mark.parametrize("name", ["SummedLayer", "XLayer", "JointLayer", "LSTMLayer", "LXLayer", "S", "X16", "LS8"])
def test_a_layer_of_ones_own_grows_whatever_its_name_begins_with(name):
    """Letters stand for layers of transformers; a name that looks like one is no letter."""
    cache = DynamicCache()
    cache.layers = [type(name, (DynamicLayer,), {})()]
    cache.update(torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3, 4), 0)
    assert dynamic_shapes({"c": cache}) == {"c": [{0: AUTO, 2: AUTO}] * 2}


def test_an_encoder_decoder_cache_is_two_lists():
    shapes = dynamic_shapes((start("t5").cache,))
    assert shapes == ([[{0: AUTO, 2: AUTO}] * 4, [{0: AUTO, 2: AUTO}] * 4],)


def test_the_block_is_not_needed_to_write_shapes():
    kwargs = decode_inputs(make_model("gemma2"), DecodeSizes())
    outside = dynamic_shapes(kwargs)
    with register_flattening_functions(patch_transformers=True):
        assert dynamic_shapes(kwargs) == outside


def test_overrides_replace_what_is_below_their_path():
    kwargs = {"x": torch.zeros(2, 3), "c": start("llama").cache}
    shapes = dynamic_shapes(kwargs, {"x": {0: Dim.DYNAMIC}, "c.value_0": None})
    assert shapes["x"] == {0: Dim.DYNAMIC}
    assert shapes["c"][:2] == [{0: AUTO, 2: AUTO}, None]
    assert dynamic_shapes(kwargs, {"c": None})["c"] is None


def test_an_override_for_a_path_that_is_not_there_lists_those_that_are():
    with pytest.raises(DynamicShapesError, match=r"\['input_id'\] is not among the inputs(.|\n)*'input_ids'"):
        dynamic_shapes({"input_ids": torch.zeros(2, 3)}, {"input_id": None})


def test_one_shape_for_all_keys_and_values():
    one = {0: "batch", 2: "length"}
    assert make_dynamic_shapes_kv_cache(start("llama").cache, one) == [one] * 4
    assert make_dynamic_shapes_kv_cache(start("mistral").cache, one) == [*[one] * 4, None]
    static = make_dynamic_shapes_kv_cache(start("llama", static=True).cache, {0: "b"})
    assert static == [{0: "b"}, {0: "b"}, *([None] if HAS_POSITION else [])] * 2
    assert make_dynamic_shapes_kv_cache(start("bart").cache, one) == [[one] * 4, [one] * 4]
    with pytest.raises(DynamicShapesError, match=r"expected a cache, found builtins\.list"):
        make_dynamic_shapes_kv_cache([1], one)


def test_named_dims_of_the_helper_are_what_torch_takes():
    model, kwargs = make_model("llama"), decode_inputs(make_model("llama"), DecodeSizes(2, 5, 3))
    batch, past, new = Dim("batch"), Dim("past"), Dim.DYNAMIC
    shapes = {
        "input_ids": {0: batch, 1: new},
        "attention_mask": {0: batch, 1: Dim.DYNAMIC},
        WORD: make_dynamic_shapes_kv_cache(cache_of(kwargs), {0: batch, 2: past}),
    }
    check_dynamic_shapes(kwargs, shapes)
    other = decode_inputs(model, DecodeSizes(3, 9, 2))
    with register_flattening_functions(patch_transformers=True):
        program = torch.export.export(model, (), kwargs, dynamic_shapes=shapes)
        with torch.no_grad():
            found = program.module()(**other).logits
    with torch.no_grad():
        other = decode_inputs(model, DecodeSizes(3, 9, 2))
        torch.testing.assert_close(found, model(**other).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x": {5: AUTO}, "l": None, "n": None}, r"x: the specification names axis 5.*\(2, 3\)"),
        ({"x": [AUTO], "l": None, "n": None}, r"x: expected one entry for each of the 2 axes"),
        ({"x": AUTO, "l": None, "n": None}, r"x: expected a dict \{axis: Dim\}"),
        ({"x": {0: 3.5}, "l": None, "n": None}, r"x\.0: expected a Dim"),
        ({"x": None, "l": None}, r"the inputs: .*Missing: \['n'\]"),
        ({"x": None, "l": None, "n": None, "y": None}, r"the inputs: .*unknown: \['y'\]"),
        ([None], r"the inputs: expected a dict"),
        ({"x": None, "l": [None], "n": None}, r"l: list has 2 children \['0', '1'\], the specification has 1"),
        ({"x": None, "l": {0: None}, "n": None}, r"l: expected a list with 2 entries"),
        ({"x": None, "l": None, "n": {0: AUTO}}, r"n: expected None for the bool True"),
        ({"x": None, "l": [{0: Dim.DYNAMIC}, None], "n": None}, r"l\.0: axis 0 should vary, but has size 1"),
    ],
)
def test_a_specification_that_does_not_fit_is_refused_with_its_key_path(shapes, message):
    inputs = {"x": torch.zeros(2, 3), "l": [torch.zeros(1), torch.zeros(2)], "n": True}
    with pytest.raises(DynamicShapesError, match=message):
        check_dynamic_shapes(inputs, shapes)


def test_a_cache_whose_specification_is_too_short_is_named_by_path():
    cache = start("mistral").cache
    with pytest.raises(DynamicShapesError, match=r"kwargs\.past: DynamicCache has 5 children .*'length'\].* has 4"):
        check_dynamic_shapes({"kwargs": {"past": cache}}, {"kwargs": {"past": [None] * 4}})


def test_a_users_own_class_is_written_as_a_list_of_its_children():

    @dataclasses.dataclass
    class Pair:
        a: torch.Tensor
        b: torch.Tensor

    class Model(torch.nn.Module):
        def forward(self, pair):
            return pair.a + pair.b.sum()

    flatten, with_keys, unflatten = make_flattening_function_for_dataclass(Pair, set())
    register_class_flattening(Pair, flatten, unflatten, with_keys)
    try:
        pair = Pair(torch.ones(3), torch.ones(4))
        shapes = dynamic_shapes({"pair": pair})
        assert shapes == {"pair": [{0: AUTO}, {0: AUTO}]}
        program = torch.export.export(Model(), (), {"pair": pair}, dynamic_shapes=shapes)
        assert program.module()(pair=Pair(torch.ones(5), torch.ones(7))).tolist() == [8.0] * 5
    finally:
        unregister_class_flattening(Pair)


def test_bounds_hold_for_all_leaves_of_one_meaning():
    inputs = decode_inputs(make_model("mistral"), DecodeSizes(2, 5, 3))
    shapes = dynamic_shapes(inputs, bounds={"batch": 4, "length": 32})
    found = {
        "tokens": [dim.max for dim in shapes["input_ids"].values()],
        "cache": [[dim.max for dim in entry.values()] for entry in shapes[WORD]],
    }
    assert found == {"tokens": [4, 32], "cache": [[4, 32]] * 4 + [[]]}


def test_a_bound_is_part_of_the_program():
    x = torch.ones(2, 3)
    with register_flattening_functions():
        program = torch.export.export(torch.nn.ReLU(), (x,), dynamic_shapes=dynamic_shapes((x,), bounds={"batch": 4}))
    assert 4 in [found.upper for found in program.range_constraints.values()]
    assert program.module()(torch.ones(4, 7)).shape == (4, 7)
    with pytest.raises((AssertionError, RuntimeError), match="4"):
        program.module()(torch.ones(5, 7))


def test_an_example_above_a_bound_is_refused():
    with pytest.raises(DynamicShapesError, match=r"x\.axis 0: size 5 of the example is above the bound 4 of 'batch'"):
        dynamic_shapes({"x": torch.ones(5, 3)}, bounds={"batch": 4})


@pytest.mark.parametrize("bounds", [{"rows": 4}, {"batch": 1}, {"length": 8.0}])
def test_what_is_no_bound_is_refused(bounds):
    with pytest.raises(InvalidArgumentError, match="expected sizes of 2 or more for 'batch' and 'length'"):
        dynamic_shapes({"x": torch.ones(5, 3)}, bounds=bounds)
