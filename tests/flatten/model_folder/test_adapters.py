"""A folder of a model with LoRA adapters generates what the model of peft generates."""

import json

import peft
import pytest
import torch

from yobx_flatten import InvalidArgumentError, OnnxGenerator, export_folder
from yobx_flatten.model_folder.source.classes import small_model


def _adapted():
    torch.manual_seed(0)
    lora = peft.LoraConfig(
        r=4, lora_alpha=16, init_lora_weights=False, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    return peft.get_peft_model(small_model("llama"), lora).eval()


@pytest.mark.slow
@pytest.mark.parametrize(("merged", "optimize"), [(False, "onnxruntime"), (True, None)])
def test_adapters_are_exported_as_weights_or_merged(merged, optimize, tmp_path):
    """Twenty tokens of two rows, which differ from those of the model without adapters."""
    adapted = _adapted()
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
    """It is not part of any layer."""
    tuned = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    model = peft.get_peft_model(small_model("llama"), tuned).eval()
    with pytest.raises(InvalidArgumentError, match="learned prompts"):
        export_folder(model, tmp_path / "out")
