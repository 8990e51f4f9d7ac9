"""Special tokens and rules, from the two configurations of a folder."""

import json

import pytest

from yobx_flatten import GenerationError
from yobx_flatten.generate.settings import read_settings, settings_of


def test_the_generation_configuration_comes_first():
    """One end or several; without a padding token the first end pads, as in transformers."""
    assert settings_of({"eos_token_id": 5}, {"eos_token_id": [6, 7]}).eos_token_ids == (6, 7)
    assert settings_of({"eos_token_id": 5}, {}).pad_token_id == 5
    assert settings_of({"eos_token_id": 0, "pad_token_id": 0}, {}).eos_token_ids == (0,)


def test_the_text_model_of_a_larger_one_is_asked_too():
    """As in a vision-language model."""
    found = settings_of({"text_config": {"eos_token_id": 4}, "image_token_index": 9}, {})
    assert (found.eos_token_ids, found.image_token_id) == ((4,), 9)


def test_a_damaged_configuration_is_named(tmp_path):
    """Not a bare JSON error."""
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(GenerationError, match=r"config\.json is damaged"):
        read_settings(tmp_path)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"num_beams": 10**9}, "num_beams"),
        ({"num_return_sequences": 5000}, "num_return_sequences"),
        ({"forced_eos_token_id": 10**9}, r"forced_eos_token_id = 1,000,000,000, but its model has 300 tokens"),
        ({"bad_words_ids": [[5], [7, 300]]}, r"bad_words_ids = 300, but its model has 300 tokens"),
        ({"forced_bos_token_id": 300}, r"forced_bos_token_id = 300, but its model has 300 tokens"),
    ],
)
def test_numbers_that_no_model_has_are_refused_before_a_loop_takes_memory(tmp_path, stated, message):
    """A billion beams are a billion rows; a token outside of the vocabulary is an index of no score."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300}))
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    with pytest.raises(GenerationError, match=message):
        read_settings(tmp_path)
