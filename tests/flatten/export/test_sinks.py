"""Attention with sinks (gpt-oss): the operator of onnxruntime takes them, that of ONNX does not."""

import types

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from yobx_flatten import export_onnx, make_dynamic_cache


class OneLayer(torch.nn.Module):
    """Four heads of queries and two of keys, with the attention of gpt-oss and nothing else."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 32)
        self.keys = torch.nn.Linear(32, 2 * 16)
        self.attention = types.SimpleNamespace(num_key_value_groups=2, training=False)
        self.sinks = torch.nn.Parameter(torch.tensor([2.0, -1.0, 0.5, 4.0]))

    def forward(self, input_ids, attention_mask, past_key_values):
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
        module = types.SimpleNamespace(sinks=self.sinks, **vars(self.attention))
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
    report = export_onnx(OneLayer().eval(), (), inputs, tmp_path / "a.onnx", cases=[], optimize=optimize).report
    assert report.ok
    assert report.operators == ({"GroupQueryAttention": 1} if optimize else {"Softmax": 1})
