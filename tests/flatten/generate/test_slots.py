"""Inputs that are the cache, and the cache that has seen nothing."""

import pytest
import torch

from yobx_flatten import GenerationError
from yobx_flatten.generate.pictures import check_ports, empty_cache
from yobx_flatten.runners.ports import Port, cache_slots, present_of

KEY = Port("past_key_values.0.key", (None, 2, None, 8), torch.float16)
LENGTH = Port("past_key_values.length", (), torch.int64)
CROSS = Port("past_key_values.0.encoder.key", (None, 2, None, 8), torch.float32)


def slots_of(*ports):
    presents = [present_of(port.name) for port in ports]
    return cache_slots(ports, [name for name in presents if name], "model.onnx")


def test_an_encoder_s_keys_need_no_output():
    """They stay as the first call returned them; what grows without an output is refused by name."""
    slots = cache_slots([KEY, CROSS], ["logits", "present.0.key"], "model.onnx")
    assert [slot.present for slot in slots] == ["present.0.key", None]
    with pytest.raises(GenerationError, match=r"model\.onnx takes past_key_values\.length and does not return present"):
        cache_slots([KEY, LENGTH], ["logits", "present.0.key"], "model.onnx")


def test_a_leaf_without_an_empty_value_is_refused():
    other = Port("past_key_values.0.memory", (None, 4, 8), torch.float32)
    with pytest.raises(GenerationError, match=r"memory has no value before the first token(.|\n)*prefill="):
        empty_cache(slots_of(other), 1)


def test_a_fixed_number_of_rows_is_kept():
    fixed = KEY._replace(shape=(2, 2, None, 8))
    assert empty_cache(slots_of(fixed), 2)[KEY.name].shape == (2, 2, 0, 8)
    with pytest.raises(GenerationError, match="exported for 2 rows, found 3"):
        empty_cache(slots_of(fixed), 3)


def test_an_input_that_is_no_numbers_is_refused():
    """A loop makes tensors of numbers; what it does not know is named before."""
    ports = {"input_ids": Port("input_ids", (None,), None), "attention_mask": Port("attention_mask", (), torch.int64)}
    with pytest.raises(GenerationError, match=r"m\.onnx has inputs input_ids of strings"):
        check_ports(ports, ["input_ids", "attention_mask"], "m.onnx")
    with pytest.raises(GenerationError, match="has the inputs attention_mask, which a generation loop does not pass"):
        check_ports(ports, ["input_ids"], "m.onnx")
