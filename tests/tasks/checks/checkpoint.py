"""The folder holds a model of ONNX, and onnxruntime makes the tokens that transformers makes from the checkpoint."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import __main__ as page

assert Path("my-folder/model.onnx").stat().st_size > 0
prompt = torch.tensor([[5, 6, 7, 8, 9]])
found = page.open_generator("my-folder").generate(prompt, max_new_tokens=20)
model = AutoModelForCausalLM.from_pretrained("my-checkpoint", dtype=torch.float32).eval()
assert torch.equal(found, model.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0))
