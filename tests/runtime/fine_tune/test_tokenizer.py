"""The tokenizer of a training: the folder's own, another one, or bytes with the numbers of ByT5."""

import dataclasses
import json

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from roundpipe_runtime.fine_tune import ByteTokenizer, FineTuneError, load_tokenizer, model_source
from tests.runtime import tiny_training as tiny

transformers = pytest.importorskip("transformers")

# All of Unicode that UTF-8 can hold.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS)
@example("")
@example("\x00\x7f\x80\uffff\U0010ffff e\u0301 \u200d \r\n")
def test_any_text_comes_back(text):
    (ids,) = ByteTokenizer().encode([text])
    assert ids.dtype == torch.int32
    assert ByteTokenizer().decode(ids) == text


@given(st.binary())
def test_any_byte_is_a_number_of_its_own(data):
    """Three above the byte, below the size of the vocabulary; half characters are decoded, too."""
    ids = [byte + 3 for byte in data]
    assert ByteTokenizer().decode(ids) == data.decode("utf-8", "replace")
    assert all(number < ByteTokenizer.vocab_size for number in ids)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=40))
def test_the_numbers_are_those_of_byt5(text):
    """As the class of transformers has them, where no special token is spelt out."""
    expected = transformers.ByT5Tokenizer(extra_ids=0)(text, add_special_tokens=False)["input_ids"]
    assert ByteTokenizer().encode([text])[0].tolist() == expected


def test_texts_stay_apart_and_special_numbers_are_no_text():
    assert [ids.tolist() for ids in ByteTokenizer().encode(["a", "", "bc"])] == [[100], [], [101, 102]]
    assert ByteTokenizer().decode([0, 100, 1, 2, 259, 1000]) == "a"


def test_the_folders_own_is_taken_or_another_folder_is_named(tmp_path):
    """It adds nothing to a text, says nothing of long ones, and knows the end."""
    tokenizer = load_tokenizer(model_source(tiny.weights_folder(tmp_path / "model")))
    ids = tokenizer.encode(["the pipe.", "again", ""])
    assert [row.tolist() for row in ids] == [[3, 4, 2], [12], []]
    assert ids[0].dtype == torch.int32
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 13)
    assert tokenizer.decode([3, 4, 1]) == "the pipe"
    source = model_source(tiny.config_folder(tmp_path / "conf"))
    assert load_tokenizer(source, tmp_path / "model").name == str(tmp_path / "model")


def test_bytes_that_were_saved_are_read_as_bytes(tmp_path):
    """By `AutoTokenizer`, and whatever class transformers would take for this type of model."""
    folder = tiny.weights_folder(tmp_path / "model", tokenizer=False)
    ByteTokenizer().save_pretrained(folder)
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    assert loaded("né", add_special_tokens=False)["input_ids"] == [113, 198, 172]
    assert (loaded.eos_token_id, loaded.pad_token_id) == (1, 0)
    assert isinstance(load_tokenizer(dataclasses.replace(model_source(folder))), ByteTokenizer)


def test_random_weights_without_a_tokenizer_read_bytes_and_others_are_refused(tmp_path):
    """What they have learnt of other tokens would be lost; whoever wants bytes says so."""
    assert isinstance(load_tokenizer(model_source(tiny.config_folder(tmp_path / "conf"))), ByteTokenizer)
    folder = tiny.weights_folder(tmp_path / "model", tokenizer=False)
    with pytest.raises(FineTuneError, match=r"contains weights but no tokenizer.*--tokenizer bytes"):
        load_tokenizer(model_source(folder))
    tiny.source().load().save_pretrained(folder)  # of a vocabulary that holds all bytes
    assert isinstance(load_tokenizer(model_source(folder), "bytes"), ByteTokenizer)


def test_folders_without_a_tokenizer_are_refused(tmp_path):
    source = tiny.source()
    with pytest.raises(FineTuneError, match="There is no folder nowhere"):
        load_tokenizer(source, "nowhere")
    with pytest.raises(FineTuneError, match=r"contains no tokenizer\. Name a folder with tokenizer\.json"):
        load_tokenizer(source, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(FineTuneError, match="cannot be read"):
        load_tokenizer(source, tmp_path)
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(FineTuneError, match=f"The tokenizer in {tmp_path} cannot be read"):
        load_tokenizer(source, tmp_path).encode(["b"])
