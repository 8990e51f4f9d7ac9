"""The Trainer of transformers, with the model alone and the same arguments, logs the same losses."""

import torch
from transformers import LlamaForCausalLM, Trainer

import __main__ as page

torch.manual_seed(0)
args = page.TrainingArguments(
    **{**page.args.to_dict(), "output_dir": "plain", "eval_strategy": "no", "save_strategy": "no"}
)
plain = Trainer(model=LlamaForCausalLM(page.config), args=args, train_dataset=page.rows)
plain.train()
found, wanted = ([row["loss"] for row in one.state.log_history if "loss" in row] for one in (page.trainer, plain))
assert len(wanted) == 6
assert torch.allclose(torch.tensor(found), torch.tensor(wanted), atol=2e-4), (found, wanted)
