"""Classes in Python files next to a config.json do not run, and no question is asked, unless the folder is trusted."""

import builtins
import json

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from roundpipe_runtime.fine_tune import FineTuneError, model_source
from tests.flatten.model_folder.words import restate
from tests.models import SIZES
from yobx_flatten import export_folder, open_generator
from yobx_flatten.__main__ import main
from yobx_flatten.errors import ModelSourceError
from yobx_flatten.model_folder.source.find import find_model

SOURCE = """
import pathlib
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pathlib.Path({mark!r}).touch()


class MyConfig(LlamaConfig):
    model_type = "mymodel"


class Negated(torch.nn.Linear):
    def forward(self, hidden):
        return -super().forward(hidden)


class MyForCausalLM(LlamaForCausalLM):
    config_class = MyConfig

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = Negated(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
"""


@pytest.fixture(autouse=True)
def _fail_on_a_question(monkeypatch, tmp_path):
    def ask(text=""):
        raise SystemExit(f"the user was asked: {text}")

    monkeypatch.setattr(builtins, "input", ask)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=96, initializer_range=0.5, eos_token_id=None, **SIZES)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "own")
    (tmp_path / "own/modeling_my.py").write_text(SOURCE.format(mark=str(tmp_path / "ran")), "utf-8")
    named = {"AutoConfig": "modeling_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyForCausalLM"}
    restate(tmp_path / "own/config.json", auto_map=named, model_type="mymodel", architectures=["MyForCausalLM"])
    return tmp_path / "own"


@pytest.mark.parametrize("model_type", ["mymodel", "llama"])
def test_code_of_a_folder_does_not_run(model_type, folder, tmp_path, capsys):
    restate(folder / "config.json", model_type=model_type)
    with pytest.raises(ModelSourceError, match=r"modeling_my\.MyConfig.*trust_remote_code=True") as refused:
        export_folder(folder, tmp_path / "out")
    assert "\n" not in str(refused.value)
    with pytest.raises(FineTuneError, match=r"needs its own code.*which is not run"):
        model_source(folder)
    assert main(["export", str(folder), "-o", str(tmp_path / "out")]) == 2
    assert "--trust-remote-code" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def test_a_folder_whose_class_transformers_has_needs_no_code(folder, tmp_path):
    """As those of models that came to transformers after they were published."""
    restate(folder / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    assert type(find_model(str(folder)).load()) is LlamaForCausalLM
    assert not (tmp_path / "ran").exists()
    trusted = find_model(str(folder), trust_remote_code=True).load()  # as in transformers, its code is used then
    assert type(trusted).__name__ == "MyForCausalLM"


def test_code_of_a_tokenizer_alone_does_not_concern_the_model(folder):
    """Its class is found by the type, as before."""
    restate(folder / "config.json", model_type="llama", auto_map={"AutoTokenizer": ["own.Words", None]})
    assert type(find_model(str(folder)).load()) is LlamaForCausalLM


@pytest.mark.slow
def test_a_folder_that_is_trusted_generates_as_its_own_code(folder, tmp_path):
    """Which is not what the Llama of the same weights does. The exported folder names no code."""
    assert main(["export", str(folder), "-o", str(tmp_path / "out"), "--trust-remote-code"]) == 0
    assert (tmp_path / "ran").exists()
    model = find_model(str(folder), trust_remote_code=True).load()
    assert type(model).__name__ == "MyForCausalLM"
    prompt = torch.tensor([[5, 6, 7]])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    wanted = model.generate(prompt, **options)
    assert torch.equal(open_generator(tmp_path / "out").generate(prompt, max_new_tokens=8), wanted)
    assert not torch.equal(LlamaForCausalLM.from_pretrained(folder).generate(prompt, **options), wanted)
    assert "auto_map" not in json.loads((tmp_path / "out/config.json").read_text("utf-8"))
    with pytest.raises(ValueError, match="mymodel"):
        AutoConfig.from_pretrained(tmp_path / "out")
