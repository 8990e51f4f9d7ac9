"""Readable names of leaves, in the order in which torch takes the objects apart."""

import pytest
import torch

from tests.cache_words import WORD
from tests.models import make_model, start
from yobx_flatten import DecodeSizes, decode_inputs, make_dynamic_cache, register_flattening_functions
from yobx_flatten.trees.walk import leaf_names, leaves_of, match, output_names, plain_names


def test_inputs_of_a_decoder_have_the_names_of_onnx_generation_tools():
    kwargs = decode_inputs(make_model("mistral"), DecodeSizes())
    assert leaf_names(kwargs) == [
        "input_ids", "attention_mask", "past_key_values.0.key", "past_key_values.0.value", "past_key_values.1.key",
        "past_key_values.1.value", "past_key_values.length",
    ]  # fmt: skip


def test_outputs_are_called_present():
    with torch.no_grad():
        outputs = make_model("llama")(input_ids=torch.ones(1, 3, dtype=torch.int64))
    names = output_names(outputs)
    assert names == ["logits", "present.0.key", "present.0.value", "present.1.key", "present.1.value"]


def test_an_encoder_decoder_cache_says_whose_keys_they_are():
    names = leaf_names({WORD: start("t5").cache})
    assert names[:2] == ["past_key_values.0.decoder.key", "past_key_values.0.decoder.value"]
    assert names[-1] == "past_key_values.1.encoder.value"


def test_names_are_unique_and_as_many_as_leaves():
    trees = [
        {"a": [1, {"b": None}], "c": (2, 3)},
        {WORD: start("gemma3", static=True).cache},
        {WORD: start("bart").cache, "x": torch.zeros(1)},
    ]
    with register_flattening_functions(patch_transformers=True):
        for tree in trees:
            names = leaf_names(tree)
            assert len(names) == len(set(names)) == len(torch.utils._pytree.tree_leaves(tree))


@pytest.mark.parametrize(
    ("graph", "spellings", "expected"),
    [
        (["a", "b"], [["b"], ["a"]], {"a": 1, "b": 0}),
        (["past_key_w8_0"], [["past.0.key", "past.key_W8_0"]], {"past_key_w8_0": 0}),
        (["a"], [["b"], ["a"], ["c"]], {"a": 1}),
        (["linear", "cat"], [["logits"], ["present.0"]], {"linear": 0, "cat": 1}),
        (["logits", "cat"], [["logits"], ["present.0"]], {"logits": 0}),
        (["x", "y"], [["x"], ["1"]], {"x": 0, "y": 1}),
        (["cat", "logits"], [["logits"], ["present.0"]], {"logits": 0}),
        (["a", "z"], [["a"], ["b"], ["c"]], {"a": 0}),
        (["a.b", "a_b"], [["a_b"], ["a.b"]], {"a.b": 1, "a_b": 0}),
        ([], [["a"]], {}),
    ],
)  # fmt: skip
def test_names_come_first_then_the_order(graph, spellings, expected):
    assert match(graph, spellings) == expected


def test_keys_alone_are_what_torch_export_uses():
    """`past_key_values_key_0` once dots are underscores."""
    import torch

    cache = make_dynamic_cache([(torch.zeros(1, 1, 2, 1), torch.ones(1, 1, 2, 1))])
    inputs = {"input_ids": torch.zeros(1), "past_key_values": cache}
    assert plain_names(inputs) == ["input_ids", "past_key_values.key_0", "past_key_values.value_0"]
    assert [leaf.sum().item() for leaf in leaves_of(inputs)] == [0, 0, 2]
