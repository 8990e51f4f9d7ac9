"""The folder opens as a model that has learned the text, and the metrics are those of its steps."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import __main__ as page

assert page.status == 0
model = AutoModelForCausalLM.from_pretrained("trained").eval()
text = Path("texts/while.txt").read_bytes()[:256]
ids = torch.tensor(list(text)).reshape(4, 64) + 3  # bytes stand after three special tokens
with torch.no_grad():
    loss = float(model(ids, labels=ids).loss)
rows = [json.loads(line) for line in Path("metrics.jsonl").read_text(encoding="utf-8").splitlines()]
losses = [row["loss"] for row in rows if "loss" in row]
assert losses[-1] < losses[0] - 0.5, losses
assert loss < losses[0] - 0.5, (loss, losses)
