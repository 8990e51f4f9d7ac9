"""Attention of exported files: one operator that takes the cache, with the numbers of the eager model.

Attention with sinks (gpt-oss) is one operator of onnxruntime; the operator of ONNX does not take sinks.
"""

from __future__ import annotations

import functools
import types

import onnx
import onnx_ir
import pytest
import torch
import transformers
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from tests.cases import cases
from tests.modules import module_of
from tests.transformers_versions import needs_transformers
from yobx_flatten import DecodeSizes, ReplayError, decode_inputs, export_onnx, make_dynamic_cache

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
MIXED = {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
OTHER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
# class and configuration; all of them have two layers
MODELS = {
    "llama": ("Llama", SMALL),
    "mistral, all layers slide": ("Mistral", {**SMALL, "sliding_window": 6}),
    "gemma 2, soft cap": ("Gemma2", {**SMALL, **MIXED, "attn_logit_softcapping": 2.0}),
    "qwen 3, norms of heads": ("Qwen3", {**SMALL, "head_dim": 8}),
    "phi 3, one projection": ("Phi3", SMALL),
    "llama, spelled out": ("Llama", {**SMALL, "attn_implementation": "eager"}),
    "falcon, one key head": ("Falcon", OTHER),
}


def make(family, settings, seed=0):
    torch.manual_seed(seed)
    settings = dict(settings)
    how = {name: settings.pop(name) for name in ("attn_implementation",) if name in settings}
    config = getattr(transformers, f"{family}Config")(**settings)
    return getattr(transformers, f"{family}ForCausalLM")._from_config(config, **how).eval()


def decode(model):
    return decode_inputs(model, DecodeSizes())


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    @functools.cache
    def export(name):
        model, path = make(*MODELS[name]), tmp_path_factory.mktemp("attention") / "model.onnx"
        return path, export_onnx(model, kwargs=decode(model), path=path).report

    return export


def nodes_of(path, *types):
    return [node for node in onnx.load(path, load_external_data=False).graph.node if node.op_type in types]


@pytest.mark.parametrize("name", cases(MODELS, quick=["llama", "gemma 2, soft cap"]))
def test_attention_is_one_operator_per_layer_that_takes_the_cache(exported, name):
    path, report = exported(name)
    attention = nodes_of(path, "Attention", "Softmax")
    assert report.opset == 23
    assert report.operators["Attention"] == 2
    assert [node.op_type for node in attention] == ["Attention", "Attention"]
    assert all(node.input[4].startswith("past_key_values.") and len(node.output) == 3 for node in attention)
    assert not [remark for remark in report.remarks if "left out:" in remark]
    assert sum(case.runtime == "onnxruntime" for case in report.cases) >= 4


@needs_transformers("5.23", "frequencies of positions are a product that is transposed")
def test_keys_have_the_heads_of_the_cache_and_no_axis_is_moved(exported):
    """Two heads of keys serve four of queries: nothing in the file has the keys of four, or swaps them with tokens.

    Qwen 3 normalises each head: what the attention takes is put together again.
    """
    path, _ = exported("llama")
    graph = onnx.load(path).graph
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.value_info}
    for node in nodes_of(path, "Attention"):
        numbers = {attribute.name: attribute.i for attribute in node.attribute}
        assert (numbers["q_num_heads"], numbers["kv_num_heads"]) == (4, 2)
        assert [shapes[name][2] for name in node.input[:3]] == [32, 16, 16]
    normed, report = exported("qwen 3, norms of heads")
    assert report.operators["RMSNormalization"] == 9
    assert not [*nodes_of(path, "Transpose"), *nodes_of(normed, "Transpose")]


def test_an_opset_that_was_asked_for_is_written_and_operators_whose_replay_fails_are_left_out_and_named(
    tmp_path, monkeypatch
):
    model = make("Llama", SMALL)
    report = export_onnx(model, kwargs=decode(model), path=tmp_path / "model.onnx", opset_version=18).report
    assert report.opset == 18
    assert report.operators == {"Softmax": 2}

    def wrong(model):
        for node in model.graph:
            if node.op_type == "Attention":
                node.attributes.add(onnx_ir.AttrFloat32("scale", 9.0))

    monkeypatch.setattr("yobx_flatten.export.onnx.file.fuse_attention", wrong)
    report = export_onnx(model, kwargs=decode(model), path=tmp_path / "model.onnx").report
    assert report.ok
    assert "Attention" not in report.operators
    (remark,) = [remark for remark in report.remarks if "was left out" in remark]
    assert remark.startswith("opset 23, attention in one operator was left out: the example: logits differs by")


def _spelled(self, query, key, value, mask):
    key, value = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x.shape[0], 4, -1, 8) for x in (key, value))
    scores = torch.tanh(query @ key.transpose(2, 3) * 0.25 / 3.0) * 3.0 + mask
    scores = scores.softmax(-1, dtype=torch.float32)
    return (scores @ value, scores) if self.weights else scores @ value


def spelled_inputs():
    torch.manual_seed(0)
    query, key, value = (4 * torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))
    return query, key, value, torch.randn(2, 1, 5, 5)


def test_attention_that_is_spelled_out_becomes_the_operator_unless_its_scores_are_returned(tmp_path):
    report = export_onnx(
        module_of(_spelled, weights=False), spelled_inputs(), path=tmp_path / "model.onnx", dynamic_shapes=None
    ).report
    (node,) = nodes_of(tmp_path / "model.onnx", "Attention")
    attributes = {attribute.name: attribute.f for attribute in node.attribute}
    assert attributes == pytest.approx({"scale": 0.25, "softcap": 3.0})
    assert not nodes_of(tmp_path / "model.onnx", "Softmax", "Expand", "Tanh")
    # other cases have numbers of other sizes, whose outputs are as much larger
    assert max(case.max_difference for case in report.cases if case.case == "the example") < 1e-5
    report = export_onnx(
        module_of(_spelled, weights=True), spelled_inputs(), path=tmp_path / "both.onnx", dynamic_shapes=None
    ).report
    assert report.operators == {"Softmax": 1}  # the operator does not return what the softmax returns


def _mask_of_keys(self, query, key, value, past_key, past_value):
    """The mask is made from the keys themselves: they are needed before the attention."""
    key, value = torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)
    mask = key.mean(dim=(1, 3))[:, None, None] > 0
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask), key


def test_a_mask_made_of_the_keys_keeps_their_concatenation(tmp_path):
    """An operator that returned the keys could not take a mask made of them; a row that sees nothing gets zeros."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, tokens, 8) for tokens in (3, 3, 3, 4, 4)]
    inputs[1][0], inputs[3][0] = -1.0, -1.0  # no key of the first row is seen
    report = export_onnx(
        module_of(_mask_of_keys), tuple(inputs), path=tmp_path / "model.onnx", dynamic_shapes=None
    ).report
    assert report.operators == {"Attention": 1}
    assert len(nodes_of(tmp_path / "model.onnx", "Attention")[0].output) == 1
    assert report.max_difference < 1e-5


def test_a_module_that_is_wrong_in_every_opset_fails_once(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Softmax(-1))  # torch and onnxruntime round apart
    with pytest.raises(ReplayError) as caught:
        export_onnx(module, (torch.linspace(-2, 2, 2048).reshape(32, 64),), path=tmp_path / "a.onnx", tolerance=0.0)
    assert [case.runtime for case in caught.value.report.cases] == [*["torch.export"] * 3, "onnxruntime"]
    assert not list(tmp_path.iterdir())


def _one_layer(self, input_ids, attention_mask, past_key_values):
    hidden = self.embedding(input_ids)
    rows, new = input_ids.shape
    query = hidden.view(rows, new, 4, 8).transpose(1, 2)
    key, value = self.keys(hidden).view(rows, new, 4, 8).transpose(1, 2).chunk(2, dim=1)
    key, value = past_key_values.update(key, value, 0)
    total = attention_mask.shape[1]
    place = torch.arange(total)
    seen = place[None, :] <= (place[:, None] + total - new)[:new]
    seen = seen[None, None] & attention_mask[:, None, None, :].bool()
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    module = types.SimpleNamespace(sinks=self.sinks, num_key_value_groups=2, training=False)
    found, _ = eager_attention_forward(module, query, key, value, mask, scaling=8**-0.5)
    return {"logits": found.flatten(2), "past_key_values": past_key_values}


@pytest.mark.parametrize("optimize", ["onnxruntime", None])
def test_sinks_are_an_input_of_the_operator_that_takes_them(tmp_path, optimize):
    """Replayed with sinks that take from a hundredth to most of the weight; spelled out without that operator."""
    torch.manual_seed(0)
    mask = torch.ones(2, 10).long()
    mask[0, :3] = 0
    inputs = {
        "input_ids": torch.randint(0, 32, (2, 3)),
        "attention_mask": mask,
        "past_key_values": make_dynamic_cache([tuple(torch.randn(2, 2, 2, 7, 8))]),
    }
    parts = {"embedding": torch.nn.Embedding(32, 32), "keys": torch.nn.Linear(32, 2 * 16)}
    module = module_of(_one_layer, **parts, sinks=torch.tensor([2.0, -1.0, 0.5, 4.0]))
    report = export_onnx(module, (), inputs, tmp_path / "a.onnx", cases=[], optimize=optimize).report
    assert report.ok
    assert report.operators == ({"GroupQueryAttention": 1} if optimize else {"Softmax": 1})
