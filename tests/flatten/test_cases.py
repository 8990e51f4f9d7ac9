"""The next decode call goes on with what the last one returned."""

from types import SimpleNamespace

import torch
from transformers.cache_utils import DynamicCache

from yobx_flatten.huggingface.builders import make_dynamic_cache
from yobx_flatten.huggingface.cases import next_inputs


def caches(length):
    return make_dynamic_cache([(torch.randn(2, 2, length, 4), torch.randn(2, 2, length, 4))])


def test_every_cache_that_comes_out_goes_in_again():
    """A model that hears while it is spoken to returns two; a field that came out as ``None`` is not an input."""
    kwargs = {
        "input_ids": torch.zeros(2, 3, dtype=torch.int64),
        "attention_mask": torch.ones(2, 8, dtype=torch.int64),
        "encoder_inputs_embeds": torch.ones(2, 3, 4),
        "past_key_values": caches(5),
        "encoder_past_key_values": caches(20),
        "padding_cache": DynamicCache(),
        "use_cache": True,
    }
    outputs = SimpleNamespace(
        logits=torch.zeros(2, 3, 7),
        past_key_values=caches(8),
        encoder_past_key_values=caches(32),
        padding_cache=None,
        encoder_inputs_embeds=torch.zeros(2, 3, 4),
    )
    following = next_inputs(kwargs, outputs)
    assert following["past_key_values"] is outputs.past_key_values
    assert following["encoder_past_key_values"] is outputs.encoder_past_key_values
    assert following["padding_cache"] is kwargs["padding_cache"]
    assert following["encoder_inputs_embeds"] is kwargs["encoder_inputs_embeds"]
    assert following["use_cache"] is True
    assert following["input_ids"].shape == (2, 3)
    assert following["attention_mask"].shape == (2, 11)


def test_a_call_without_a_cache_is_the_last():
    """Nothing says what came before."""
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    assert next_inputs({"input_ids": tokens}, SimpleNamespace(logits=torch.zeros(1, 1, 7))) is None
