"""A folder of adapters stands for the model that they are of, with the adapters merged, and so does a loaded model."""

import importlib.util
import json
import os
from functools import partial

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from roundpipe_runtime.fine_tune import Lora, add_lora, load_tokenizer, model_source, save_model
from tests.flatten.model_folder.test_switched_adapters import save_adapter
from tests.flatten.model_folder.words import restate
from tests.models import SIZES
from yobx_flatten import InvalidArgumentError, OnnxGenerator, export_folder, open_generator
from yobx_flatten.__main__ import main
from yobx_flatten.errors import ModelSourceError
from yobx_flatten.files import limited
from yobx_flatten.model_folder.source.adapter import read_adapters
from yobx_flatten.model_folder.source.configuration import small_model
from yobx_flatten.model_folder.source.find import find_model
from yobx_flatten.model_folder.source.open import open_model

# PEFT 0.21 asks models of transformers 5.23 for an attribute by its old name
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

IDS = torch.tensor([[5, 6, 7, 8]])
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=300, initializer_range=0.5, eos_token_id=None, **SIZES)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def _adapter(base, config=None):
    config = config or peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    save_adapter(AutoModelForCausalLM.from_pretrained(base), config, base.parent / "adapter")
    return base.parent / "adapter"


@torch.no_grad()
def _logits(base, adapter=None):
    model = AutoModelForCausalLM.from_pretrained(base)
    return (model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)).eval()(input_ids=IDS).logits


KINDS = {
    "LoRA": None,
    "DoRA": peft.LoraConfig(r=4, target_modules=["o_proj"], use_dora=True),
    "a head that was trained": peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "all linear layers": peft.LoraConfig(r=2, lora_alpha=3, use_rslora=True, target_modules="all-linear"),
    "IA3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": peft.LoHaConfig(r=2, target_modules=["q_proj"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_of_an_adapter_is_the_adapted_one(kind, base):
    adapter = _adapter(base, KINDS[kind])
    wanted = _logits(base, adapter)
    with torch.no_grad():
        found = find_model(str(adapter)).load()(input_ids=IDS).logits
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-4)
    assert (wanted - _logits(base)).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("trained_by", ["PEFT", "roundpipe train --lora"])
def test_a_folder_of_adapters_is_exported(trained_by, base, tmp_path):
    if trained_by == "PEFT":
        adapter = _adapter(base)
        ByT5Tokenizer(extra_ids=0).save_pretrained(base)
    else:
        source = model_source(base)
        model = add_lora(source.load(), Lora.parse("2"))
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.ones_like(parameter) if parameter.requires_grad else 0
        adapter = save_model(model, load_tokenizer(source, "bytes"), tmp_path / "adapter", source=source)
    assert main(["export", str(adapter), "-o", str(tmp_path / "out")]) == 0
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    mask = torch.ones_like(IDS)
    wanted = adapted.generate(input_ids=IDS, attention_mask=mask, max_new_tokens=16, do_sample=False)
    assert torch.equal(open_generator(tmp_path / "out").generate(IDS, max_new_tokens=16), wanted)
    assert (tmp_path / "out/tokenizer_config.json").is_file()
    assert not (tmp_path / "out/adapter_config.json").exists()


def test_a_configuration_next_to_the_adapter_changes_nothing(base):
    adapter = _adapter(base)
    (adapter / "config.json").write_bytes((base / "config.json").read_bytes())
    assert find_model(str(adapter)).adapter == adapter


def _rewrite(adapter, change):
    weights = load_file(adapter / WEIGHTS)
    change(weights, next(name for name in weights if "v_proj.lora_B" in name))
    save_file(weights, adapter / WEIGHTS, metadata={"format": "pt"})


WRONG = {
    "missing": (lambda weights, name: weights.pop(name), r"lacks the weight .*v_proj\.lora_B"),
    "unused": (lambda weights, name: weights.update(more=torch.ones(1)), "holds the weight more"),
}


@pytest.mark.parametrize("change", WRONG)
def test_weights_that_are_not_those_of_the_adapter_are_refused_by_name(change, base):
    """PEFT warns of missing ones, and is silent about others."""
    adapter = _adapter(base)
    _rewrite(adapter, WRONG[change][0])
    with pytest.raises(ModelSourceError, match=WRONG[change][1]):
        find_model(str(adapter)).load()


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"base_model_name_or_path": "./nowhere/base"}, r"nowhere/base, which is not found(.|\n)*merge_and_unload"),
        ({"base_model_name_or_path": None}, r"does not name its base model(.|\n)*merge_and_unload"),
        ({"base_model_name_or_path": "llama"}, "an adapter of llama, but llama has no weights"),
        ({"megatron_config": {"a": 1}}, "names a module to import"),
        ({"peft_type": "OWN"}, "has peft_type 'OWN', unknown to PEFT"),
        ({"task_type": "NOPE"}, r"adapter_config\.json is not a configuration of PEFT: Invalid task type"),
        ({"peft_type": "ADALORA"}, "is not a configuration of PEFT"),
        ({"use_bdlora": 5}, "is not a configuration of PEFT"),
        ({"layer_replication": [[0, 1]] * 100_000}, "which is not a list of pairs .* at most 10,000 layers"),
        ({"layer_replication": [[0, 10**9]]}, "layer_replication"),
        ({"layer_replication": [[0, "1"]]}, "layer_replication"),
    ],
)
def test_an_adapter_without_a_model_is_refused_with_what_to_do(entries, reason, base):
    adapter = _adapter(base)
    restate(adapter / "adapter_config.json", **entries)
    with pytest.raises(ModelSourceError, match=reason):
        find_model(str(adapter))


_BACKTRACKS = "(([a-z_.0-9]+)+)+!"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork, and no limits")
@pytest.mark.parametrize(
    "entries",
    [
        {"target_modules": _BACKTRACKS},
        {"exclude_modules": _BACKTRACKS},
        {"rank_pattern": {_BACKTRACKS: 4}},
        {"modules_to_save": [_BACKTRACKS]},
    ],
    ids=lambda entries: next(iter(entries)),
)
def test_a_pattern_without_an_end_is_refused(entries, base, monkeypatch):
    monkeypatch.setattr(limited, "_CPU_SECONDS", 1)
    adapter = _adapter(base)
    restate(adapter / "adapter_config.json", **entries)
    with pytest.raises(
        ModelSourceError, match=r"adapter_config\.json has a pattern .* that cannot be matched: .*CPU sec"
    ):
        find_model(str(adapter)).load()


@pytest.mark.parametrize(
    "entries",
    [{"r": 10**9}, {"r": 10**30}, {"r": "many"}, {"r": 4.5}, {"rank_pattern": {"q_proj": 10**9}}],
    ids=["r", "no number of the machine", "text", "fraction", "pattern"],
)
@pytest.mark.parametrize("is_switched", [False, True], ids=["merged", "switched"])
def test_a_rank_that_the_weights_do_not_have_is_refused(entries, is_switched, base):
    """PEFT would make matrices of 128 GB for each layer, before it looks at the weights."""
    adapter = _adapter(base)
    restate(adapter / "adapter_config.json", **entries)
    model = AutoModelForCausalLM.from_pretrained(base)
    read = partial(read_adapters, model, {"one": adapter}) if is_switched else find_model(str(adapter)).load
    with pytest.raises(ModelSourceError, match=r"adapter_config\.json states rank .*at most 1,024"):
        read()


@pytest.mark.parametrize(
    "entries",
    [
        {"init_lora_weights": "pissa_niter_1000000000"},
        pytest.param(
            {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4, "loftq_iter": 10**9}},
            marks=pytest.mark.skipif(not importlib.util.find_spec("scipy"), reason="PEFT reads LoftQ with scipy only"),
        ),
        {"peft_type": "XLORA", "hidden_size": 8, "adapters": {"a": "owner/name"}},
    ],
    ids=["PiSSA", "LoftQ", "X-LoRA"],
)
def test_first_weights_of_many_steps_and_other_adapters_are_refused(entries, base):
    """PEFT would compute for hours what the file replaces, or load what the file names."""
    adapter = _adapter(base)
    restate(adapter / "adapter_config.json", **entries)
    with pytest.raises(ModelSourceError, match=r"adapter_config\.json (sets 1,000 or more iterations|names adap)"):
        find_model(str(adapter)).load()


def test_an_adapter_of_itself_is_refused(base):
    adapter = _adapter(base)
    restate(adapter / "adapter_config.json", base_model_name_or_path=str(adapter))
    with pytest.raises(ModelSourceError, match="is an adapter itself"):
        find_model(str(adapter))


def test_weights_of_a_model_next_to_an_adapter_are_refused(base):
    """transformers would load the model that the adapter names."""
    adapter = _adapter(base)
    (adapter / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    with pytest.raises(ModelSourceError, match=r"also weights of a model \(model\.safetensors\)\. Remove one"):
        find_model(str(adapter))


def test_learned_prompts_are_refused(base):
    """They are inputs, and no file has such an input."""
    adapter = _adapter(base, peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    with pytest.raises(InvalidArgumentError, match="contains learned prompts"):
        find_model(str(adapter))


def test_an_adapter_is_not_streamed(base):
    with pytest.raises(InvalidArgumentError, match="changes the weights"):
        open_model(find_model(str(_adapter(base))), dtype="float32", weights="stream", to="onnx")


@pytest.mark.slow
def test_the_report_states_the_adapter(base, tmp_path):
    done = export_folder(_adapter(base), tmp_path / "out", proof="none")
    assert any("adapter" in note and "was merged" in note for note in done.reports["model.onnx"].remarks)


def _adapted_model():
    torch.manual_seed(0)
    lora = peft.LoraConfig(
        r=4, lora_alpha=16, init_lora_weights=False, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    return peft.get_peft_model(small_model("llama"), lora).eval()


@pytest.mark.slow
@pytest.mark.parametrize(("merged", "optimize"), [(False, "onnxruntime"), (True, None)])
def test_adapters_are_exported_as_weights_or_merged(merged, optimize, tmp_path):
    adapted = _adapted_model()
    ids = torch.randint(4, 259, (2, 9), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
    wanted = adapted.generate(input_ids=ids, **options)
    assert not torch.equal(wanted, small_model("llama").generate(ids, **options))
    given = adapted.merge_and_unload() if merged else adapted
    done = export_folder(given, tmp_path / "out", optimize=optimize, proof="sample")
    assert done.task == "text-generation"
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert OnnxGenerator(tmp_path / "out", threads=1).generate(ids, max_new_tokens=20).tolist() == wanted.tolist()


def test_a_prompt_that_was_learned_is_refused(tmp_path):
    tuned = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    model = peft.get_peft_model(small_model("llama"), tuned).eval()
    with pytest.raises(InvalidArgumentError, match="learned prompts"):
        export_folder(model, tmp_path / "out")
