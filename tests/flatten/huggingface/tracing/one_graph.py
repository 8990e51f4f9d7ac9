"""Exports a model once, and steps through decode calls of other sizes beside the eager model."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import StaticCache

from tests.cache_words import WORD, cache_of
from tests.models import SIZES
from yobx_flatten import DecodeSizes, decode_inputs, dynamic_shapes
from yobx_flatten.huggingface.cases import next_inputs

__all__ = ["WINDOW", "assert_serves", "export_decode", "small_model", "some_sizes", "steps_of"]

WINDOW = 8
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1}
_SIZES = {**SIZES, **_TOKENS, "vocab_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 128}


def small_model(config_class: str, model_class: str, options: dict[str, Any] | None = None) -> Any:
    """Return a small model with random weights; skip the test where the installed transformers has no such class.

    Options are what differs from the usual sizes; ``...`` leaves a field alone.
    """
    if not hasattr(transformers, config_class):
        pytest.skip(f"transformers {transformers.__version__} has no {config_class}")
    chosen = {key: value for key, value in {**_SIZES, **(options or {})}.items() if value is not ...}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, model_class)(getattr(transformers, config_class)(**chosen)).eval()


def inputs(model: Any, sizes: DecodeSizes, room: int | None, seed: int = 0) -> dict[str, Any]:
    """Decode inputs; with a static cache of that room."""
    if room is None:
        return decode_inputs(model, sizes, seed=seed)
    cache = StaticCache(config=model.config, max_cache_len=room)
    return decode_inputs(model, sizes, like={"input_ids": 0, "attention_mask": 0, WORD: cache}, seed=seed)


def export_decode(model: Any, sizes: DecodeSizes, *, room: int | None = None) -> Any:
    """Export one decode call inside a block that is open; return the callable program."""
    kwargs = inputs(model, sizes, room)
    with torch.no_grad():
        program = torch.export.export(model, (), copy.deepcopy(kwargs), dynamic_shapes=dynamic_shapes(kwargs))
    return program.module()


def assert_serves(program: Any, model: Any, cases: Iterable[DecodeSizes], *, room: int | None = None) -> None:
    """Compare some steps of every case, each fed with the cache that came out of the one before."""
    for sizes in cases:
        case = inputs(model, sizes, room, seed=sizes.past)
        found, expected = steps_of(program, case), steps_of(model, case)
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            difference = (ours - theirs).abs().max().item()
            assert difference < 1e-4, f"{sizes}, step {step}: logits differ by {difference:.1e}"


def steps_of(call: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Logits of some decode steps, each fed with the cache that came out of the one before."""
    logits = []
    kwargs = copy.deepcopy(kwargs)
    for _ in range(3):
        with torch.no_grad():
            outputs = call(**{**kwargs, WORD: copy.deepcopy(cache_of(kwargs))})
        logits.append(outputs.logits)
        kwargs = next_inputs(kwargs, outputs)
    return logits


def some_sizes() -> list[DecodeSizes]:
    """Below, at and past the window; one token, two and more; other batches; a padded row."""
    return [
        DecodeSizes(3, 4, 1),
        DecodeSizes(1, 3, 2),
        DecodeSizes(3, WINDOW - 3, 3),
        DecodeSizes(2, WINDOW - 1, 1),
        DecodeSizes(1, WINDOW, 3),
        DecodeSizes(4, 2 * WINDOW + 5, 1, padding=3),
        DecodeSizes(2, WINDOW + 1, 3, padding=WINDOW + 1),
        DecodeSizes(2, 5, WINDOW + 3, padding=2),
    ]
