"""The report of a recording, as a person reads it."""

import pytest
import torch
import transformers

from tests.cache_words import WORD
from tests.flatten.record.record_models import generate_inputs, make_generator
from yobx_flatten import record_calls

GEMMA = """\
Gemma3ForCausalLM.forward: 6 calls
  batch 2   new 1, 4   total 4..9   past 0, 4..8   kept 4..7
  total = past + new
  kept = min(past, 7)

prefill: 1 call
  argument        dtype  sizes              varies
  input_ids       int64  2 x 4              0: batch, 1: new
  attention_mask  int64  2 x 4              0: batch, 1: total
  position_ids    int64  2 x 4              0: batch, 1: new
  cache           -      holds nothing yet
  constant: use_cache=True, logits_to_keep=1, return_dict=True

decode: 5 calls
  argument                           dtype    sizes             varies
  input_ids                          int64    2 x 1             0: batch
  attention_mask                     int64    2 x 5..9          0: batch, 1: total
  position_ids                       int64    2 x 1             0: batch
  cache.key_W8_0 ... value_W8_0 (2)  float32  2 x 2 x 4..7 x 8  0: batch, 2: kept
  cache.key_D_1 ... value_D_1 (2)    float32  2 x 2 x 4..8 x 8  0: batch, 2: past
  constant: use_cache=True, logits_to_keep=1, return_dict=True

note: batch: one size (2) was seen. It is assumed to vary, as a registered class states this."""


class Passes(torch.nn.Module):
    def forward(self, parts, step, at, ratio):
        return at


def test_a_generate_is_told_phase_by_phase():
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.skip("the arguments that generate passes differ from version to version; the text is that of 5.23")
    model = make_generator("gemma3")
    with record_calls(model) as calls, torch.no_grad():
        model.generate(**generate_inputs("gemma3", length=4), max_new_tokens=6, do_sample=False)
    # an older word for the cache is longer, and the columns with it
    assert _words(str(calls)) == _words(GEMMA.replace("cache", WORD))


def _words(text):
    return [line.split() for line in text.splitlines()]


def test_numbers_and_other_values_are_shown():
    model = Passes()
    with record_calls(model) as calls:
        for step in (3, 4, 5):
            model([torch.ones(step, 2), torch.ones(step, 2)], step, torch.tensor(1), 0.5)
    assert str(calls).splitlines() == [
        "Passes.forward: 3 calls",
        "  batch 3..5   n 3..5",
        "  n = batch",
        "",
        "forward: 3 calls",
        "  argument           dtype    sizes     varies",
        "  parts.0 ... 1 (2)  float32  3..5 x 2  0: batch",
        "  step               int      3..5      n",
        "  at                 int64    ()",
        "  constant: ratio=0.5",
    ]
