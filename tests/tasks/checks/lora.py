"""PEFT loads what was saved; the weights below the adapters are those of the start, and the adapters have learned."""

import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

import __main__ as page

torch.manual_seed(0)
base = LlamaForCausalLM(page.config).to(torch.bfloat16)
before = {name: weight.clone() for name, weight in base.state_dict().items()}
loss = base(page.ids, labels=page.ids).loss
adapted = PeftModel.from_pretrained(base, page.folder)
assert adapted(page.ids, labels=page.ids).loss < loss - 0.01

trained = page.model.state_dict()
prefix, frozen = "base_model.model.", [name for name in trained if "lora" not in name]
assert len(frozen) == len(before)
for name in frozen:
    plain = name.removeprefix(prefix).replace(".base_layer", "")
    assert torch.equal(trained[name], before[plain]), name
page.model.close()
