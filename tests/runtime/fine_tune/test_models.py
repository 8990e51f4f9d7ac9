"""Where a model comes from, the adapters that it gets, and the folder in which it is saved."""

import errno
import importlib.util
import json
import re

import pytest
import torch

from roundpipe_runtime import fine_tune
from roundpipe_runtime.device.disk import disk_of
from roundpipe_runtime.fine_tune import ByteTokenizer, FineTuneError, Lora, add_lora, model_source, save_model
from tests.runtime import tiny_training as tiny
from yobx_flatten import MissingDependencyError

transformers = pytest.importorskip("transformers")


def test_a_folder_with_weights_is_loaded_as_it_is_stored(tmp_path):
    """Nothing is read before. float16 becomes bfloat16, as gradients would vanish in float16."""
    folder = tiny.weights_folder(tmp_path / "model", dtype=torch.bfloat16)
    source = model_source(folder)
    assert (source.has_weights, source.folder, source.vocab_size, source.longest) == (True, folder, 40, 64)
    expected = tiny.source(vocab_size=40).load(seed=5).bfloat16().state_dict()
    found = source.load()
    assert found.training
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())
    assert source.load(dtype=torch.float32).dtype == torch.float32
    half = model_source(tiny.weights_folder(tmp_path / "half", dtype=torch.float16))
    assert half.load().dtype == torch.bfloat16


def test_a_configuration_alone_has_random_weights(tmp_path):
    """As a folder or as a file; the seed makes them, and nothing else is drawn."""
    folder = tiny.config_folder(tmp_path / "model")
    state = torch.get_rng_state()
    for name in (folder, folder / "config.json"):
        source = model_source(name)
        assert not source.has_weights
        one, same, other = (source.load(seed=seed).lm_head.weight for seed in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
        assert one.dtype == torch.float32
    assert torch.equal(torch.get_rng_state(), state)


DEEP = '{"hidden_size": ' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "contains no config.json. Name a folder that save_pretrained wrote"),
        ("{", "is damaged: it is not JSON"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000}', "num_hidden_layers = 1,000,000,000, but the "),
        ('{"model_type": "llama", "text_config": {"n_layer": [30000]}}', "states n_layer = 30,000, but the limit is "),
        (DEEP, "nested too deeply"),
        ('{"hidden_size": 3}', "is not a configuration of transformers"),
        ('{"model_type": "t5"}', "transformers has no causal LM of type 't5'"),
    ],
)
def test_folders_that_hold_no_language_model_are_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(FineTuneError) as caught:
        model_source(tmp_path)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("size", [2**40, 10**8, 10**30, -3])
def test_weights_that_no_memory_holds_are_refused(tmp_path, size):
    """Random ones, and those of a folder whose configuration is of another model."""
    alone, folder = tiny.config_folder(tmp_path / "config"), tiny.weights_folder(tmp_path / "weights")
    for place in (alone, folder):
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**config, "hidden_size": size, "head_dim": 8}))
        with pytest.raises(FineTuneError, match=re.escape(str(place))):
            model_source(place).load()


def test_damaged_weights_and_adapters_alone_are_refused(tmp_path):
    folder = tiny.weights_folder(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(FineTuneError, match="cannot be loaded"):
        model_source(folder).load()
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FineTuneError, match=r"contains adapters but no model\. Merge them:"):
        model_source(tmp_path)


# -- weights that are read into a file one after the other -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_a_model_on_a_disk_has_the_weights_of_one_in_memory(tmp_path, folder_on_disk, dtype):
    """Cast where another type is asked for, in training mode, with tied weights tied; all of it on the disk."""
    source = model_source(tiny.weights_folder(tmp_path / "model", dtype=torch.bfloat16))
    expected, found = source.load(dtype=dtype), source.load(dtype=dtype, host=f"disk:{folder_on_disk}")
    assert found.training
    assert list(found.state_dict()) == list(expected.state_dict())
    for (name, one), (_, other) in zip(expected.named_parameters(), found.named_parameters(), strict=True):
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
        assert one.requires_grad == other.requires_grad, name
        assert disk_of(other) is not None, name
    assert all(torch.equal(a, b) for a, b in zip(expected.buffers(), found.buffers(), strict=True))
    tokens = torch.arange(8).reshape(2, 4)
    assert torch.equal(expected(tokens).logits, found(tokens).logits)


def test_on_a_disk_random_weights_are_those_of_memory_and_those_of_another_model_are_refused(tmp_path, folder_on_disk):
    host = f"disk:{folder_on_disk}"
    expected, found = tiny.source().load(seed=3), tiny.source().load(seed=3, host=host)
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), found.parameters(), strict=True))
    folder = tiny.weights_folder(tmp_path / "model")
    tiny.config(num_hidden_layers=9).save_pretrained(folder)
    with pytest.raises(FineTuneError, match="lacks"):
        model_source(folder).load(host=host)


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "x", "0", "8,", "8,0", "8,x", "8,16,", "-1", "1.5", "q_proj"])
def test_a_word_says_rank_alpha_and_targets_and_another_one_is_refused(text):
    assert Lora.parse(" 8 , 4 ") == Lora(8, 4)
    assert Lora.parse("8,16,q_proj,v_proj") == Lora(8, 16, ("q_proj", "v_proj"))
    with pytest.raises(FineTuneError, match="--lora 8   --lora 8,16   --lora 8,16,q_proj,v_proj"):
        Lora.parse(text)


def learning(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_the_named_modules_get_adapters():
    """Of that rank; nothing else learns, and the seed makes their weights. Without names, all linear layers get one."""
    peft = pytest.importorskip("peft", reason="LoRA is PEFT's")
    models = [add_lora(tiny.source().load(), Lora(2, 4, ("q_proj",)), seed=seed) for seed in (1, 1, 2)]
    assert isinstance(models[0], peft.PeftModel)
    assert len(learning(models[0])) == 6  # two matrices in each of three layers
    assert all("q_proj.lora_" in name and 2 in p.shape for name, p in learning(models[0]).items())
    one, same, other = (next(p for name, p in learning(model).items() if "lora_A" in name) for model in models)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    names = {name.partition(".lora_")[0] for name in learning(add_lora(tiny.source().load(), Lora.parse("2")))}
    assert len(names) == 21  # seven in each of three layers
    assert not any("lm_head" in name for name in names)


def test_a_target_that_is_not_there_and_a_missing_peft_are_refused(monkeypatch):
    pytest.importorskip("peft", reason="LoRA is PEFT's")
    model, find = tiny.source().load(), importlib.util.find_spec
    with pytest.raises(FineTuneError, match=r"LlamaForCausalLM has no module q_pro\. Its linear layers are down_proj"):
        add_lora(model, Lora(2, 4, ("q_pro",)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[lora\]'"):
        add_lora(model, Lora(2, 4))


# -- the folder of a trained model: it appears when it is complete and has been loaded, or not at all ------------------


def changed(model):
    with torch.no_grad():
        for parameter in learning(model).values():
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
    assert isinstance(fine_tune.load_tokenizer(model_source(folder)), ByteTokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_peft_loads_saved_adapters(tmp_path):
    """Into the model of the folder that they were trained from."""
    peft = pytest.importorskip("peft", reason="LoRA is PEFT's")
    source = model_source(tiny.weights_folder(tmp_path / "base"))
    model = changed(add_lora(source.load(), Lora.parse("2"))).eval()
    save_model(model, fine_tune.load_tokenizer(source), tmp_path / "out", source=source)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_folder_that_exists_is_replaced_as_a_whole_if_asked(tmp_path, monkeypatch):
    """Half a model never has its name: a full disk leaves the folder that was there, or none."""
    source = tiny.source()
    model = source.load()
    how = {"source": source, "overwrite": True}

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(model, "save_pretrained", full)
        with pytest.raises(OSError, match="No space left"):
            save_model(model, ByteTokenizer(), tmp_path / "out", **how)
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").touch()
        with pytest.raises(FineTuneError, match=r"out exists. Name another folder, or replace it: --overwrite"):
            fine_tune.check_output(tmp_path / "out")
        with pytest.raises(OSError, match="No space left"):
            save_model(model, ByteTokenizer(), tmp_path / "out", **how)
        assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]
    save_model(model, ByteTokenizer(), tmp_path / "out", **how)
    assert not (tmp_path / "out" / "mine.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_loaded_otherwise_is_not_kept(tmp_path, monkeypatch):
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
