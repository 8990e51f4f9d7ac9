"""Versions to trace of the functions that read tokens in chunks, next to the functions themselves."""

import importlib

import pytest
import torch
from transformers.cache_utils import Cache

from yobx_flatten.huggingface.tracing.models import CHUNK_SCANS

pytestmark = pytest.mark.skipif(
    not hasattr(Cache, "get_recurrent_state"), reason="before 5.23 these functions have another form"
)

ROWS, TOKENS, HEADS, KEY, VALUE = 2, 11, 4, 3, 5  # eleven tokens are two chunks of four, and a part of one


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def arguments(name, state):
    if name == "mamba2_chunk_scan":
        tokens = (random(ROWS, TOKENS, HEADS, VALUE), random(ROWS, TOKENS, HEADS), -random(HEADS).abs())
        given = (*tokens, random(ROWS, TOKENS, 2, KEY), random(ROWS, TOKENS, 2, KEY) + 1, 4, random(HEADS))
        start = random(ROWS, HEADS, VALUE, KEY) if state else None
        options = {"dt_bias": random(HEADS), "dt_softplus": True, "dt_limit": (0.0, 2.0), "return_final_states": True}
        return given, {**options, "initial_states": start}
    is_kimi = "kimi" in name
    heads = HEADS if is_kimi else 2
    decay = random(ROWS, TOKENS, HEADS, KEY) if is_kimi else random(ROWS, TOKENS, HEADS)
    given = (random(ROWS, TOKENS, heads, KEY), random(ROWS, TOKENS, heads, KEY) + 1, random(ROWS, TOKENS, HEADS, VALUE))
    start = random(ROWS, HEADS, KEY, VALUE) if state else None
    beta = random(ROWS, TOKENS, HEADS).sigmoid()
    options = {"chunk_size": 4, "output_final_state": True, "use_qk_l2norm_in_kernel": True, "initial_state": start}
    return (*given, -decay.abs(), beta), options


# of functions that are alike in several models, one
ONE_OF_EACH = [(models[0], name, make) for models, _, name, make in CHUNK_SCANS]


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(("model", "name", "make"), ONE_OF_EACH, ids=[name for _, name, _ in ONE_OF_EACH])
def test_a_scan_over_tokens_is_what_the_chunks_compute(model, name, make, state):
    original = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    given, options = arguments(name, state)
    for found, wanted in zip(make(original)(*given, **options), original(*given, **options), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
