"""The tokenizer of an exported folder is that of the model, or there is none and the report states why."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.flatten.model_folder.words import restate, word_tokenizer
from yobx_flatten import export_folder
from yobx_flatten.__main__ import main
from yobx_flatten.model_folder.source.find import origin_of


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    word_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=300
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _note(done):
    return next((note for note in done.reports["model.onnx"].remarks if "tokenizer" in note), None)


def _loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.slow
@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_loaded_model_has_the_tokenizer_of_its_checkpoint(is_adapted, checkpoint, tmp_path):
    """Also after adapters were trained and merged, where there is no other way to export."""
    model = _loaded(checkpoint)
    if is_adapted:
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, lora).merge_and_unload().eval()
    done = export_folder(model, tmp_path / "out", proof="none")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("word0 word1")["input_ids"] == [2, 5, 6, 3]
    assert _note(done) is None


def _as_it_is(folder):
    return _loaded(folder), None


def _from_nowhere(folder):
    model = _loaded(folder)
    model.config.name_or_path = model.name_or_path = ""
    return model, "does not state the folder that it is from"


def _moved(folder):
    model = _loaded(folder)
    folder.rename(folder.parent / "elsewhere")
    return model, "which is not a folder on this machine"


def _of_another_kind(folder):
    model = _loaded(folder)
    restate(folder / "config.json", model_type="mistral")
    return model, "is for 'mistral' models, but this model is of type 'llama'"


def _with_more_words(folder):
    model = _loaded(folder)
    model.resize_token_embeddings(310)
    return model, "has a vocabulary of 300 tokens, but this model has 310"


CHANGES = [_as_it_is, _from_nowhere, _moved, _of_another_kind, _with_more_words]


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_that_is_not_of_the_model_is_none(change, checkpoint):
    model, reason = change(checkpoint)
    folder, found = origin_of(model)
    assert (folder == checkpoint) is (reason is None)
    assert (reason or "") in found


@pytest.mark.slow
def test_no_tokenizer_is_invented(checkpoint, tmp_path):
    model, reason = _from_nowhere(checkpoint)
    done = export_folder(model, tmp_path / "out", proof="none")
    assert reason in _note(done)
    assert not (tmp_path / "out/tokenizer_config.json").exists()
    done = export_folder(model, tmp_path / "out", proof="none", source=checkpoint, overwrite=True)
    assert _note(done) is None
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("word0 word1")["input_ids"] == [2, 5, 6, 3]


@pytest.mark.slow
def test_a_model_given_by_type_reads_bytes(tmp_path):
    """Its weights are random, and were trained on no other tokens."""
    assert main(["export", "llama", "-o", str(tmp_path / "out"), "--proof", "none"]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a", add_special_tokens=False)["input_ids"] == [ord("a") + 3]
