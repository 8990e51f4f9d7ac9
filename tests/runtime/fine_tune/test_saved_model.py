"""The folder of a trained model: it appears when it is complete and has been loaded, or not at all."""

import errno

import pytest
import torch

from roundpipe_runtime.fine_tune import (
    ByteTokenizer,
    FineTuneError,
    Lora,
    add_lora,
    check_output,
    load_tokenizer,
    model_source,
    save_model,
)
from tests.runtime import tiny_training as tiny

transformers = pytest.importorskip("transformers")


def changed(model):
    """As if it had learnt."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.125)
    return model


def test_transformers_loads_what_is_saved(tmp_path):
    """Model and tokenizer, by their auto classes; a model that was random knows where a text ends."""
    source = tiny.source()
    model = changed(source.load())
    folder = save_model(model, ByteTokenizer(), tmp_path / "out", source=source)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert (loaded.config.eos_token_id, loaded.generation_config.eos_token_id) == (1, 1)
    assert isinstance(load_tokenizer(model_source(folder)), ByteTokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_peft_loads_saved_adapters(tmp_path):
    """Into the model of the folder that they were trained from."""
    peft = pytest.importorskip("peft", reason="LoRA is PEFT's")
    source = model_source(tiny.weights_folder(tmp_path / "base"))
    model = changed(add_lora(source.load(), Lora.parse("2"))).eval()
    save_model(model, load_tokenizer(source), tmp_path / "out", source=source)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_folder_that_exists_is_replaced_only_if_asked(tmp_path):
    """And then as a whole."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    with pytest.raises(FineTuneError, match=r"out exists. Name another folder, or replace it: --overwrite"):
        check_output(tmp_path / "out")
    source = tiny.source()
    save_model(source.load(), ByteTokenizer(), tmp_path / "out", source=source, overwrite=True)
    assert not (tmp_path / "out" / "mine.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("before", [True, False])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, before):
    """Half a model never has its name."""
    source = tiny.source()
    model = source.load()
    if before:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").touch()

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        save_model(model, ByteTokenizer(), tmp_path / "out", source=source, overwrite=True)
    assert [path.name for path in tmp_path.rglob("*")] == (["out", "mine.txt"] if before else [])


def test_what_is_loaded_otherwise_is_not_kept(tmp_path, monkeypatch):
    """A file that was damaged on its way is found before the run is over."""
    source = tiny.source()
    model = source.load()
    save = model.save_pretrained

    def damaged(folder):
        with torch.no_grad():
            model.lm_head.weight[0, 0] += 1
            save(folder)
            model.lm_head.weight[0, 0] -= 1

    monkeypatch.setattr(model, "save_pretrained", damaged)
    with pytest.raises(FineTuneError, match=r"saved weight lm_head\.weight differs"):
        save_model(model, ByteTokenizer(), tmp_path / "out", source=source)
    assert list(tmp_path.iterdir()) == []
