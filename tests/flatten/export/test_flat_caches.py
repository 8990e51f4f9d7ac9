"""Wrappers written by hand, with the cache built inside, export with all sizes of their keys and values varying."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
import transformers

from tests.cache_words import cache_of
from yobx_flatten import export_onnx
from yobx_flatten.huggingface.cache_names import argument_of

LAYERS, HEADS, SIZE = 2, 2, 8


def _model(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=SIZE,
        initializer_range=0.3,
    )
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


class Wrapper(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.word = model, argument_of(model.forward)

    def called(self, input_ids, pairs):
        cache = transformers.DynamicCache(ddp_cache_data=pairs)
        out = self.model(input_ids=input_ids, use_cache=True, **{self.word: cache})
        return out.logits, [(layer.keys, layer.values) for layer in cache_of(out).layers]


class Flat(Wrapper):
    def forward(self, input_ids, key_0, value_0, key_1, value_1):
        logits, pairs = self.called(input_ids, [(key_0, value_0), (key_1, value_1)])
        return (logits, *[tensor for pair in pairs for tensor in pair])


class Legacy(Wrapper):
    def forward(self, input_ids, past):
        logits, pairs = self.called(input_ids, list(past))
        return logits, tuple(pairs)


class Stacked(Wrapper):
    def forward(self, input_ids, past):
        logits, pairs = self.called(input_ids, [(past[i, 0], past[i, 1]) for i in range(LAYERS)])
        return logits, torch.stack([torch.stack(pair) for pair in pairs])


def _example(kind):
    past = [torch.randn(2, HEADS, 5, SIZE) for _ in range(2 * LAYERS)]
    ids = torch.randint(0, 64, (2, 3))
    if kind is Flat:
        return (ids, *past)
    if kind is Legacy:
        return ids, tuple(zip(past[::2], past[1::2], strict=True))
    return ids, torch.stack(past).reshape(LAYERS, 2, 2, HEADS, 5, SIZE)


@pytest.mark.parametrize(("kind", "family"), [(Flat, "Qwen3"), (Legacy, "Llama"), (Stacked, "Llama")])
def test_a_text_in_pieces_gives_the_scores_of_the_whole(kind, family, tmp_path):
    model = _model(family)
    report = export_onnx(kind(model).eval(), _example(kind), path=tmp_path / "flat.onnx").report
    assert not [remark for remark in report.remarks if "fixed as in the example" in remark]
    session = onnxruntime.InferenceSession(tmp_path / "flat.onnx")
    names = [one.name for one in session.get_inputs()]
    for rows in (1, 2):
        ids = torch.randint(0, 64, (rows, 12))
        with torch.no_grad():
            whole = model(ids, use_cache=True)
        past = [np.zeros((rows, HEADS, 0, SIZE), np.float32)] * (2 * LAYERS)
        if kind is Stacked:
            past = [np.zeros((LAYERS, 2, rows, HEADS, 0, SIZE), np.float32)]
        first = 0
        for new in (7, 1, 1, 3):
            given = ids[:, first : first + new].numpy()
            logits, *past = session.run(None, dict(zip(names, [given, *past], strict=True)))
            np.testing.assert_allclose(logits, whole.logits[:, first : first + new], atol=1e-4)
            first += new
        kept = [tensor for layer in cache_of(whole).layers for tensor in (layer.keys, layer.values)]
        found = past[0].reshape(2 * LAYERS, *past[0].shape[2:]) if kind is Stacked else past
        for one, other in zip(found, kept, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
