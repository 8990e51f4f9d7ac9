"""A loop of plain PyTorch, with the whole model and the whole batch, ends with the same weights."""

import torch
from transformers import LlamaForCausalLM

import __main__ as page

torch.manual_seed(0)
plain = LlamaForCausalLM(page.config)
optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
for _ in range(3):
    loss = plain(**page.batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
assert torch.allclose(page.loss, loss, rtol=1e-5)
# a step moves each number by 1e-2 at most; where a gradient is next to nothing, Adam makes rounding larger
found = page.model.state_dict()
assert [name for name, weight in plain.state_dict().items() if not torch.allclose(weight, found[name], atol=1e-3)] == []
page.model.close()
