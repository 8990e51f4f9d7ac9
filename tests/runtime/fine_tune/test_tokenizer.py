"""The tokenizer of a training: the folder's own, another one, or bytes; never the wrong one in silence."""

import dataclasses
import json

import pytest
import torch

from roundpipe_runtime.fine_tune import ByteTokenizer, FineTuneError, load_tokenizer, model_source
from tests.runtime import tiny_training as tiny

pytest.importorskip("transformers")


def test_the_folders_own_is_taken(tmp_path):
    """It adds nothing to a text, says nothing of long ones, and knows the end."""
    source = model_source(tiny.weights_folder(tmp_path / "model"))
    tokenizer = load_tokenizer(source)
    ids = tokenizer.encode(["the pipe.", "again", ""])
    assert [row.tolist() for row in ids] == [[3, 4, 2], [12], []]
    assert ids[0].dtype == torch.int32
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 13)
    assert tokenizer.decode([3, 4, 1]) == "the pipe"


def test_random_weights_without_one_read_bytes(tmp_path):
    assert isinstance(load_tokenizer(model_source(tiny.config_folder(tmp_path / "model"))), ByteTokenizer)


def test_another_folder_can_be_named(tmp_path):
    """A configuration and a tokenizer that stand apart."""
    tiny.word_tokenizer().save_pretrained(tmp_path / "words")
    source = model_source(tiny.config_folder(tmp_path / "model"))
    assert load_tokenizer(source, tmp_path / "words").name == str(tmp_path / "words")


def test_bytes_that_were_saved_are_read_as_bytes(tmp_path):
    """Whatever class transformers would take for this type of model."""
    folder = tiny.weights_folder(tmp_path / "model", tokenizer=False)
    ByteTokenizer().save_pretrained(folder)
    assert isinstance(load_tokenizer(dataclasses.replace(model_source(folder))), ByteTokenizer)


def test_weights_without_a_tokenizer_are_refused(tmp_path):
    """What they have learnt of other tokens would be lost; whoever wants bytes says so."""
    folder = tiny.weights_folder(tmp_path / "model", tokenizer=False)
    with pytest.raises(FineTuneError, match=r"contains weights but no tokenizer.*--tokenizer bytes"):
        load_tokenizer(model_source(folder))
    wide = tiny.source().load()
    wide.save_pretrained(folder)
    assert isinstance(load_tokenizer(model_source(folder), "bytes"), ByteTokenizer)


def test_folders_without_a_tokenizer_are_refused(tmp_path):
    """One that is not there, one that is empty, one that is damaged."""
    source = tiny.source()
    with pytest.raises(FineTuneError, match="There is no folder nowhere"):
        load_tokenizer(source, "nowhere")
    with pytest.raises(FineTuneError, match=r"contains no tokenizer: none of tokenizer\.json"):
        load_tokenizer(source, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(FineTuneError, match="cannot be read"):
        load_tokenizer(source, tmp_path)


def test_a_tokenizer_that_fails_on_a_text_is_named(tmp_path):
    """Its own error says nothing of where it is from."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    tokenizer = load_tokenizer(tiny.source(), tmp_path)
    with pytest.raises(FineTuneError, match=f"The tokenizer in {tmp_path} cannot be read"):
        tokenizer.encode(["b"])
