"""What is around the attention of onnxruntime: masks and norms in fewer operators, and positions as they are given."""

import numpy
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx
import onnx_ir as ir
import onnxruntime

from tests.cache_words import cache_of
from yobx_flatten import DecodeSizes, decode_inputs, export_onnx
from yobx_flatten.export.onnx.rewrite.heads import rotate_together
from yobx_flatten.export.onnx.rewrite.optimize import fuse_skip_norms
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


def test_sums_meet_their_norms_and_the_mask_is_read_as_it_is(placed):
    """The first norm has no sum before it, the last sum meets the norm before the head; no key is looked up."""
    model, path, operators = placed
    assert operators["SkipSimplifiedLayerNormalization"] == 2 * model.config.num_hidden_layers
    assert operators["RMSNormalization"] == 1
    assert operators["RotaryEmbedding"] == model.config.num_hidden_layers
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


def _attention(interleaved):
    """A file: one product's queries, keys and values, rotated; 4 heads of 16 elements, 2 of keys."""
    text = f"""
    <ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
    file (float[B, T, 128] given, float[B, T, 8] cosines, float[B, T, 8] sines,
          float[B, 2, P, 16] past_key, float[B, 2, P, 16] past_value, int32[B] last, int32 total)
      => (float[B, T, 64] out, float[B, 2, S, 16] key, float[B, 2, S, 16] value)
      <int64[3] widths = {{64, 32, 32}}> {{
        q, k, v = Split<axis = -1>(given, widths)
        tq = RotaryEmbedding<num_heads = 4, interleaved = {interleaved}>(q, cosines, sines)
        tk = RotaryEmbedding<num_heads = 2, interleaved = {interleaved}>(k, cosines, sines)
        out, key, value = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2>
            (tq, tk, v, past_key, past_value, last, total)
    }}
    """
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(("batch", "tokens", "past"), [(1, 1, 6), (1, 3, 4), (3, 1, 2), (2, 5, 0), (4, 1, 0)])
def test_one_rotation_is_that_of_queries_and_of_keys(interleaved, batch, tokens, past):
    """onnxruntime's results for the same file before and after, the values to the bit."""
    model, generator = _attention(interleaved), numpy.random.default_rng(0)
    angles = generator.uniform(-500, 500, (batch, tokens, 8))
    feeds = {
        "given": generator.normal(size=(batch, tokens, 128)).astype(numpy.float32),
        "cosines": numpy.cos(angles).astype(numpy.float32),
        "sines": numpy.sin(angles).astype(numpy.float32),
        "past_key": generator.normal(size=(batch, 2, past, 16)).astype(numpy.float32),
        "past_value": generator.normal(size=(batch, 2, past, 16)).astype(numpy.float32),
        "last": numpy.full(batch, past + tokens - 1, numpy.int32),
        "total": numpy.array(past + tokens, numpy.int32),
    }
    changed = ir.from_proto(model)
    rotate_together(changed)
    operators = [node.op_type for node in changed.graph]
    assert operators.count("RotaryEmbedding") == 1
    assert "Split" not in operators
    wanted, found = _run(model, feeds), _run(ir.to_proto(changed), feeds)
    for one, other in zip(wanted, found, strict=True):
        numpy.testing.assert_allclose(other, one, atol=1e-6)
    numpy.testing.assert_array_equal(found[2], wanted[2])


NORM = """
    <ir_version: 10, opset_import: ["" : 23]>
    file (float[B, T, 8] left, float[{right}] right) => (float[B, T, 8] normed, float[B, T, 8] twice)
      <float[8] weights = {{1, 2, 3, 4, 5, 6, 7, 8}}> {{
        total = Add(left, right)
        normed = RMSNormalization<axis = {axis}, epsilon = 0.01>(total, weights)
        twice = Add(total, total)
    }}
"""


@pytest.mark.parametrize(
    ("right", "axis", "fused"), [("B, T, 8", -1, True), ("B, T, 8", 2, True), ("8", -1, False), ("1, T, 8", -1, False)]
)
def test_a_sum_and_its_norm_are_one_operator_where_both_sides_have_one_shape(right, axis, fused):
    """Also where something else reads the sum; a sum that repeats one side stays. Results are those of onnxruntime."""
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(NORM.format(right=right, axis=axis)))
    changed = ir.from_proto(model)
    fuse_skip_norms(changed)
    assert ("SkipSimplifiedLayerNormalization" in [node.op_type for node in changed.graph]) is fused
    generator, sizes = numpy.random.default_rng(0), {"B": 2, "T": 3}
    feeds = {
        "left": generator.normal(size=(2, 3, 8)).astype(numpy.float32),
        "right": generator.normal(size=[sizes.get(one) or int(one) for one in right.split(", ")]).astype("float32"),
    }
    for wanted, found in zip(_run(model, feeds), _run(ir.to_proto(changed), feeds), strict=True):
        numpy.testing.assert_allclose(found, wanted, rtol=1e-5)


def _run(model, feeds):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)
