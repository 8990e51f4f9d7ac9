"""The folder of a masked language model gives the states of its encoder, as AutoModel computes them, not scores."""

import torch
from transformers import AutoModel

import __main__ as page

encoder = AutoModel.from_pretrained("my-bert", dtype=torch.float32).eval()
with torch.no_grad():
    wanted = encoder(input_ids=page.ids, attention_mask=page.real).last_hidden_state
seen = page.real.bool()
assert torch.allclose(page.states[seen], wanted[seen], atol=1e-4)
rows = [wanted[row, : int(page.real[row].sum())].mean(0) for row in range(2)]
assert torch.allclose(page.means, torch.stack(rows), atol=1e-4)
