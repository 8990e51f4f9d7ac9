"""A loop of PyTorch, with the whole batch and its mean loss, ends with the same loss and the same weights."""

import torch
from torch import nn

import __main__ as page

torch.manual_seed(0)
layers = [nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)]
plain = nn.Sequential(*layers)
optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
for _ in range(3):
    loss = nn.functional.mse_loss(plain(page.inputs), page.labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
found = page.model.state_dict()
assert [name for name, weight in plain.state_dict().items() if not torch.allclose(weight, found[name], atol=1e-5)] == []
page.model.close()
