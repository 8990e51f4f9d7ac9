"""Inputs of another form: shapes for another registration, None in the example, nested values in ``**kwargs``."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch.export import Dim, ShapesCollection
from transformers import EncoderDecoderCache

from tests.cache_words import WORD, cache_of
from tests.flatten.huggingface.tracing.one_graph import small_model
from tests.models import make_model, start
from tests.modules import module_class
from yobx_flatten import DecodeSizes, decode_inputs, dynamic_shapes, export_program
from yobx_flatten.declare import register, register_flattening_functions, unregister_class_flattening
from yobx_flatten.errors import InvalidArgumentError, SpecMismatchError
from yobx_flatten.trace.adapted_shapes import adapted_shapes

pytestmark = pytest.mark.slow

AUTO = Dim.AUTO
KEYS = {0: AUTO, 2: AUTO}


def by_tensor(inputs):
    shapes = ShapesCollection()
    shapes[inputs["input_ids"]] = shapes[inputs["attention_mask"]] = {0: AUTO, 1: AUTO}
    for layer in cache_of(inputs).layers:
        shapes[layer.keys] = shapes[layer.values] = KEYS
    return shapes


def attribute_order(obj):
    if isinstance(obj, torch.Tensor):
        return [dict.fromkeys(range(obj.dim()), AUTO)]
    if isinstance(obj, type):
        return []
    below = obj if isinstance(obj, list) else obj.values() if isinstance(obj, dict) else vars(obj).values()
    return [
        entry for x in below if isinstance(x, (list, dict)) or hasattr(x, "__dict__") for entry in attribute_order(x)
    ]


WAYS = {
    "keys and values in turn": lambda cache: [KEYS] * (2 * len(cache.layers)),
    "keys, then values": lambda cache: [[KEYS] * len(cache.layers), [KEYS] * len(cache.layers)],
    "as a dict": lambda cache: {name: [KEYS] * len(cache.layers) for name in ("key_cache", "value_cache")},
    "by attributes": attribute_order,
}


def program_and_inputs(name, past=None):
    model, sizes = make_model(name), DecodeSizes() if past is None else DecodeSizes(3, past, 2)
    return model, decode_inputs(model, sizes)


def serves(program, name, past):
    model, inputs = program_and_inputs(name, past)
    with torch.no_grad():
        expected = model(**copy.deepcopy(inputs)).logits
        found = program.module()(**inputs).logits
    return bool((found - expected).abs().max() < 1e-5)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("mistral", "keys and values in turn"), ("mistral", "by attributes"), ("gemma3", "by attributes")),
        ("mistral", "a collection of shapes"),
    ],
)
def test_a_specification_of_the_tensors_alone_is_enough_and_ties_a_program_to_no_length(name, way):
    model, inputs = program_and_inputs(name)
    if way == "a collection of shapes":
        shapes = by_tensor(inputs)
    else:
        shapes = {**dynamic_shapes(inputs), WORD: WAYS[way](cache_of(inputs))}
    with register_flattening_functions(patch_transformers=True):
        program = torch.export.export(model, (), inputs, dynamic_shapes=shapes)
        assert all(serves(program, name, past) for past in (6, 13))


def test_a_static_cache_may_be_specified_by_its_attributes():
    model = make_model("llama")
    begun = start("llama", static=True)
    inputs = {"input_ids": torch.ones(2, 3, dtype=torch.int64), WORD: begun.cache}
    shapes = {"input_ids": {0: AUTO, 1: AUTO}, WORD: attribute_order(begun.cache)}
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        expected = model(**copy.deepcopy(inputs)).logits
        program = torch.export.export(model, (), copy.deepcopy(inputs), dynamic_shapes=shapes)
        assert torch.allclose(program.module()(**inputs).logits, expected, atol=1e-5)


@pytest.mark.parametrize("way", ["keys, then values", "as a dict"])
def test_keys_and_values_apart_are_the_same_specification(way):
    model, inputs = program_and_inputs("mistral")
    with register_flattening_functions(patch_transformers=True):
        first, other = (
            adapted_shapes(model, (), inputs, {**dynamic_shapes(inputs), WORD: WAYS[name](cache_of(inputs))})
            for name in ("keys and values in turn", way)
        )
    assert other == first
    assert first[WORD] == [KEYS] * 4 + [None]  # the counter is a tensor without axes


Sums = module_class(
    "Sums", lambda self, x, cache: x.sum() + sum(layer.keys.sum() for layer in cache.self_attention_cache.layers)
)


def test_two_caches_in_one_may_be_one_list():
    """transformers' exporters of 5.16 write the tensors of both one behind the other."""
    caches, longer = ([program_and_inputs("llama", past)[1][WORD] for _ in range(2)] for past in (None, 9))
    shapes = {"x": None, "cache": [KEYS] * 2 * sum(len(cache.layers) for cache in caches)}
    with register_flattening_functions(patch_transformers=True):
        program = torch.export.export(Sums(), (torch.ones(3), EncoderDecoderCache(*caches)), dynamic_shapes=shapes)
        expected = 3 + sum(layer.keys.sum() for layer in longer[0].layers)
        assert torch.allclose(program.module()(torch.ones(3), EncoderDecoderCache(*longer)), expected)


@pytest.mark.parametrize("shapes", [[KEYS] * 3, [[KEYS], [KEYS]], {"keys": [KEYS]}])
def test_what_is_not_recognised_is_left_to_torch(shapes):
    model, inputs = program_and_inputs("llama")
    shapes = {**dynamic_shapes(inputs), WORD: shapes}
    with (
        register_flattening_functions(patch_transformers=True),
        pytest.raises((ValueError, torch._dynamo.exc.UserError), match=r"mismatch|Expected|past_key_values"),
    ):
        torch.export.export(model, (), inputs, dynamic_shapes=shapes)


def test_an_entry_for_an_integer_counter_still_serves():
    """Specifications written for earlier versions say `Dim.AUTO` where there is a tensor without axes now."""
    model, inputs = program_and_inputs("mistral")
    given = dynamic_shapes(inputs)
    shapes = {**given, WORD: [*given[WORD][:-1], AUTO]}
    with register_flattening_functions(patch_transformers=True):
        program = torch.export.export(model, (), inputs, dynamic_shapes=shapes)
        assert serves(program, "mistral", 13)


@pytest.mark.parametrize("wrap", [dict, list, tuple])
def test_axes_of_a_cache_that_never_vary_are_fixed_where_torch_was_to_find_out(wrap):
    model, inputs = program_and_inputs("llama")
    everything = dict.fromkeys(range(4), AUTO) if wrap is dict else wrap([AUTO] * 4)
    shapes = dynamic_shapes(inputs)
    shapes[WORD] = [everything] * (2 * len(cache_of(inputs).layers))
    with register_flattening_functions(patch_transformers=True):
        found = adapted_shapes(model, (), inputs, shapes)[WORD]
    wanted = [AUTO, None, AUTO, None]
    assert found == [dict(enumerate(wanted)) if wrap is dict else wrap(wanted)] * len(found)
    shapes[WORD] = [{0: AUTO, 1: Dim.DYNAMIC, 2: AUTO}] * len(found)
    with register_flattening_functions(patch_transformers=True):
        asked = adapted_shapes(model, (), inputs, shapes)[WORD]
    assert asked == shapes[WORD]


def test_a_cache_with_states_of_a_convolution_serves_other_calls():
    model = small_model("ZayaConfig", "ZayaForCausalLM", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 1})
    with torch.no_grad(), register_flattening_functions(patch_transformers=True):
        example = decode_inputs(model, DecodeSizes(2, 5, 3))

        def every_axis(value):
            if isinstance(value, torch.Tensor):
                return dict.fromkeys(range(value.dim()), AUTO)
            node = torch.utils._pytree.SUPPORTED_NODES.get(type(value))
            return None if node is None else [every_axis(child) for child in node.flatten_fn(value)[0]]

        shapes = {name: every_axis(value) for name, value in example.items()}
        options = {"strict": False, "prefer_deferred_runtime_asserts_over_guards": True}
        program = torch.export.export(model, (), copy.deepcopy(example), dynamic_shapes=shapes, **options).module()
        for sizes in (DecodeSizes(2, 20, 1), DecodeSizes(3, 9, 1, padding=3)):
            given = decode_inputs(model, sizes)
            expected = model(**copy.deepcopy(given)).logits
            torch.testing.assert_close(program(**given).logits, expected, rtol=1e-4, atol=1e-4)


X = torch.ones(2, 3)
Adds = module_class("Adds", lambda self, x, more=None: x if more is None else x + more)


@dataclasses.dataclass
class Batch:
    x: Any
    more: Any = None


AddsField = module_class("AddsField", lambda self, batch: batch.x if batch.more is None else batch.x + batch.more)


def test_a_mask_in_the_place_of_none_is_refused():
    """The program has no mask: it would compute as if nothing were padded."""
    model = make_model("llama")
    exported = export_program(model, (), {**decode_inputs(model, DecodeSizes()), "attention_mask": None}, cases=[])
    refused = r"kwargs\['attention_mask'\] was None when .* ignore a tensor of shape"
    with pytest.raises(SpecMismatchError, match=refused):
        exported(**decode_inputs(model, DecodeSizes(padding=3)))
    inputs = [{**decode_inputs(model, DecodeSizes(padding=3)), "attention_mask": None} for _ in range(2)]
    with torch.no_grad():
        torch.testing.assert_close(exported(**inputs[0]).logits, model(**inputs[1]).logits)


@pytest.mark.parametrize(
    ("args", "kwargs", "called", "place"),
    [
        ((X, None), {}, ((X, X), {}), r"args\[1\]"),
        ((X,), {"more": None}, ((X,), {"more": X}), r"kwargs\['more'\]"),
        ((X,), {"more": None}, ((X,), {"more": 3}), r"kwargs\['more'\] .* the int 3"),
    ],
)
def test_a_program_that_is_called_directly_refuses_it(args, kwargs, called, place):
    with register_flattening_functions():
        program = torch.export.export(Adds(), args, kwargs)
    for module in (program.module(), program.run_decompositions().module()):
        assert torch.equal(module(*args, **kwargs), X)
        with pytest.raises(SpecMismatchError, match=place):
            module(*called[0], **called[1])


def test_a_field_of_a_registered_class_counts_like_an_argument(tmp_path):
    register(Batch)
    try:
        exported = export_program(AddsField(), (Batch(X),), cases=[])
        exported.save(tmp_path / "batch.pt2")
        with register_flattening_functions():
            loaded = torch.export.load(tmp_path / "batch.pt2").module()
        for call in (exported, exported.program.module(), loaded):
            assert torch.equal(call(Batch(X)), X)
            with pytest.raises(SpecMismatchError, match=r"args\[0\]\.more was None"):
                call(Batch(X, X))
    finally:
        unregister_class_flattening(Batch)


def test_a_program_with_none_is_exported_again():
    """Strict or not; in torch 2.11, dynamo takes no module that has hooks where an input is ``None``."""
    with register_flattening_functions():
        program = torch.export.export(Adds(), (X,), {"more": None})
        for strict in (False, True) if torch.__version__ >= (2, 13) else (False,):
            again = torch.export.export(program.module(), (X,), {"more": None}, strict=strict)
            assert torch.equal(again.module()(X, more=None), X)


ROWS = {0: Dim.AUTO}
SHAPES = {"x": ROWS, "extra": {"a": ROWS}}
Takes = module_class("Takes", lambda self, x, **kwargs: x + kwargs["extra"]["a"])


def inputs(rows):
    return (torch.ones(rows, 3),), {"extra": {"a": torch.ones(rows, 3)}}


def has_defect(args, kwargs):
    try:
        program = torch.export.export(Takes(), args, kwargs, dynamic_shapes=SHAPES)
    except Exception:  # versions before 2.14 refuse the shapes
        return False
    try:
        program.module()(*args, **kwargs)
    except NameError:
        return True
    return False


def test_it_is_refused_with_its_name_where_torch_has_the_defect_and_export_program_takes_it():
    args, kwargs = inputs(4)
    error, refused = (AssertionError, torch._dynamo.exc.UserError), None  # torch's own, before 2.14
    if has_defect(args, kwargs):
        error, refused = InvalidArgumentError, r"Takes\.forward takes extra in its \*\*kwargs(.|\n)*, extra,"
    with register_flattening_functions():
        with pytest.raises(error, match=refused):
            torch.export.export(Takes(), args, kwargs, dynamic_shapes=SHAPES)
        # sizes that are fixed have no such guards
        program = torch.export.export(Takes(), args, kwargs)
        assert torch.equal(program.module()(*args, **kwargs), torch.full((4, 3), 2.0))
    exported = export_program(Takes(), args, kwargs)
    more, others = inputs(6)
    assert torch.equal(exported.program.module()(*more, **others), torch.full((6, 3), 2.0))
