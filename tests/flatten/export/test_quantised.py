"""Caches that store keys and values in 8-bit floating point, with a scale each and an empty tensor in their place."""

import pytest
import torch
from transformers import cache_utils

from tests.cache_words import WORD, cache_of
from tests.models import make_model
from yobx_flatten import dynamic_shapes, export_program
from yobx_flatten.huggingface.cases import why_not_resizable

pytestmark = [
    pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="the layer class of 5.23"),
    pytest.mark.slow,
]


def _inputs(model, rows: int, past: int, new: int) -> dict[str, object]:
    ids = torch.randint(3, 90, (rows, past + new), generator=torch.Generator().manual_seed(rows))
    cache = cache_utils.QuantizedCache("fp8", model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :past], **{WORD: cache})
    mask = torch.ones(rows, past + new, dtype=torch.int64)
    return {"input_ids": ids[:, past:].contiguous(), "attention_mask": mask, WORD: cache}


def test_one_program_serves_all_lengths_of_an_fp8_cache():
    model = make_model("llama")
    exported = export_program(model, (), _inputs(model, 2, 5, 3), steps=2)
    assert exported.report.max_difference == 0.0
    assert len(exported.report.cases) == 4
    with torch.no_grad():
        found, expected = exported(**_inputs(model, 3, 11, 2)), model(**_inputs(model, 3, 11, 2))
    torch.testing.assert_close(found.logits, expected.logits)
    keys = cache_of(found).layers[0]._quantized_keys[0]
    assert keys.dtype is torch.float8_e4m3fn
    assert keys.shape[-2] == 13


def test_what_is_not_of_the_shape_that_its_name_says_stays_as_it_is():
    """A scale has no axes, and the empty tensor in place of the keys has one."""
    model = make_model("llama")
    shapes = dynamic_shapes(_inputs(model, 2, 5, 3))[WORD]
    assert [sorted(entry) for entry in shapes[:6]] == [[], [], [0, 2], [], [0, 2], []]


def test_another_quantisation_is_not_made_up():
    """The replay in other sizes would be one with another cache; the report says that there is none."""

    class Layer:
        pass

    model = make_model("llama")
    cache = cache_utils.QuantizedCache("fp8", model.config)
    cache.layers = [Layer()]
    kwargs = {"input_ids": torch.ones(2, 3, dtype=torch.int64), WORD: cache}
    assert "quantized cache" in why_not_resizable(model, kwargs, WORD)
