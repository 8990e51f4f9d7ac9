"""Operators next to onnxruntime's attention: fewer of them make the mask, and positions are passed on unchanged."""

import onnx
import pytest
import torch

from tests.cache_words import cache_of
from yobx_flatten import DecodeSizes, decode_inputs, export_onnx
from yobx_flatten.model_folder.source.classes import small_model
from yobx_flatten.runners.open import open_runner


@pytest.fixture(scope="module")
def placed(tmp_path_factory):
    """A model whose caller gives positions, its file and its operators."""
    model, path = small_model("llama"), tmp_path_factory.mktemp("placed") / "model.onnx"
    inputs = decode_inputs(model, DecodeSizes(past=5, new=2))
    inputs["position_ids"] = torch.arange(5, 7)[None].repeat(inputs["input_ids"].shape[0], 1)
    report = export_onnx(model, (), inputs, path, optimize="onnxruntime").report
    assert report.ok
    return model, path, report.operators


def test_rotations_and_norms_are_one_operator_each_and_the_mask_is_read_as_it_is(placed):
    """Two rotations and two norms a layer, and the norm before the head; no key is looked up."""
    model, path, operators = placed
    assert operators["RMSNormalization"] == 2 * model.config.num_hidden_layers + 1
    assert operators["RotaryEmbedding"] == 2 * model.config.num_hidden_layers
    assert "GatherND" not in {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.parametrize("past", [0, 7])
@pytest.mark.parametrize("first", [0, 900])
def test_positions_are_those_of_the_caller_in_each_row(placed, past, first):
    """Also in the prompt, where onnxruntime's own rotation would take those of the first row for all."""
    model, path, _ = placed
    if past:
        inputs = decode_inputs(model, DecodeSizes(batch=2, past=past, new=1, padding=3))
        leaves = [leaf.clone() for layer in cache_of(inputs).layers for leaf in (layer.keys, layer.values)]
    else:
        inputs = {"input_ids": torch.arange(8, 18).reshape(2, 5), "attention_mask": torch.ones(2, 5, dtype=torch.int64)}
        leaves = [torch.zeros(2, 2, 0, 16) for _ in range(4)]
    columns = torch.arange(inputs["input_ids"].shape[1])
    inputs["position_ids"] = torch.stack([columns + first, columns + first + 11])
    feeds = {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids")}
    names = [f"past_key_values.{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    found = open_runner(path).run({**feeds, **dict(zip(names, leaves, strict=True))})
    with torch.no_grad():
        wanted = model(**inputs, use_cache=True)
    torch.testing.assert_close(found["logits"], wanted.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(found["present.0.key"], cache_of(wanted).layers[0].keys, atol=1e-5, rtol=0)
