"""Adapters asked for in a word, and put into a model by PEFT."""

import importlib.util

import pytest
import torch

from roundpipe_runtime.fine_tune import FineTuneError, Lora, add_lora
from tests.runtime import tiny_training as tiny
from yobx_flatten import MissingDependencyError

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", Lora(8, 16)),
        ("8,4", Lora(8, 4)),
        (" 8 , 4 ", Lora(8, 4)),
        ("8,16,q_proj,v_proj", Lora(8, 16, ("q_proj", "v_proj"))),
    ],
)
def test_a_word_says_rank_alpha_and_targets(text, expected):
    assert Lora.parse(text) == expected


@pytest.mark.parametrize("text", ["", "x", "0", "8,", "8,0", "8,x", "8,16,", "-1", "1.5", "q_proj"])
def test_another_word_is_refused(text):
    """With the three ways to write it."""
    with pytest.raises(FineTuneError, match="--lora 8   --lora 8,16   --lora 8,16,q_proj,v_proj"):
        Lora.parse(text)


def test_the_named_modules_get_adapters():
    """Of that rank; nothing else learns, and the seed makes their weights."""
    peft = pytest.importorskip("peft", reason="LoRA is PEFT's")
    models = [add_lora(tiny.source().load(), Lora(2, 4, ("q_proj",)), seed=seed) for seed in (1, 1, 2)]
    assert isinstance(models[0], peft.PeftModel)
    learning = [{name: p for name, p in model.named_parameters() if p.requires_grad} for model in models]
    assert len(learning[0]) == 6  # two matrices in each of three layers
    assert all("q_proj.lora_" in name and 2 in p.shape for name, p in learning[0].items())
    one, same, other = (next(p for name, p in found.items() if "lora_A" in name) for found in learning)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_without_names_all_linear_layers_get_one():
    """But the head: seven in each of three layers."""
    pytest.importorskip("peft", reason="LoRA is PEFT's")
    model = add_lora(tiny.source().load(), Lora.parse("2"))
    names = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert len(names) == 21
    assert not any("lm_head" in name for name in names)


def test_a_target_that_is_not_there_is_refused():
    """With those that are."""
    pytest.importorskip("peft", reason="LoRA is PEFT's")
    with pytest.raises(FineTuneError, match=r"LlamaForCausalLM has no module q_pro\. Its linear layers are down_proj"):
        add_lora(tiny.source().load(), Lora(2, 4, ("q_pro",)))


def test_without_peft_the_line_that_installs_it_is_shown(monkeypatch):
    model, find = tiny.source().load(), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[lora\]'"):
        add_lora(model, Lora(2, 4))
