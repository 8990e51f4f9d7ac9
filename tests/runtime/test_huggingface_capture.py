"""Tests of roundpipe_runtime.huggingface.capture: hidden states, attentions and router logits of a cut model."""

import pytest
import torch

from .hf_small import hf_batch, hf_model, wrapped

FLAGS = [{"output_hidden_states": True}, {"output_attentions": True}, {"output_router_logits": True}]


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2", "seq2seq:t5"])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: next(iter(flags)))
def test_captured_outputs_are_those_of_the_plain_model(name, flags):
    """Every tensor that the model hands out is there, joined from all microbatches, in its place."""
    model = hf_model(name)
    model.set_attn_implementation("eager")
    batch = hf_batch()
    del batch["labels"]
    if name == "seq2seq:t5":
        batch["decoder_input_ids"] = batch["input_ids"].flip(1)
    with torch.no_grad():
        expected = model(**batch, **flags, use_cache=False)
        pipeline = wrapped(model, example={key: value[:2] for key, value in batch.items()})
        found = pipeline(**batch, **flags)
        plain = pipeline(**batch)
    pipeline.close()
    assert list(found) == list(expected)
    if name == "mixtral" or "output_router_logits" not in flags:
        assert len(found) > len(plain)
    for key in set(expected) - {"aux_loss"}:
        assert_same(found[key], expected[key])


def assert_same(found, expected):
    if isinstance(expected, torch.Tensor):
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-9, equal_nan=True)
        return
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
