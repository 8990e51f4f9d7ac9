"""
Weights that stay on the device
===============================

A pipeline uploads the parameters of a stage each time the stage runs, so frozen weights are uploaded twice in each
step. With ``keep_parameters`` a device keeps as many weights as it has room for. This page trains small layers between
frozen layers, counts the uploaded bytes for devices of different sizes, and compares the losses.
"""

# %%
# A model whose large weights are frozen
# --------------------------------------
#
# The model has twelve blocks: a wide frozen layer, and in parallel a narrow trained layer, like an adapter.

import matplotlib.pyplot as plt
import torch
from torch import nn

from roundpipe_runtime import (
    ModelExecutePlan,
    RoundPipe,
    RoundPipeRunConfig,
    VirtualDevice,
)

WIDTH, STEPS = 256, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(12)])


weights = sum(parameter.nbytes for parameter in make_model().parameters())
trained = sum(p.nbytes for p in make_model().parameters() if p.requires_grad)
print(f"{weights / 1e6:.2f} MB of weights, {trained / 1e6:.2f} MB of them train")

# %%
# Devices of several sizes
# ------------------------
#
# Every device trains the same steps. The first device keeps no weights between steps; the other devices have memory for
# a share of the weights. Each block is a separate stage: small stages need little of the memory for parameters, and the
# remaining memory keeps weights.

blocks = [range(number, number + 1) for number in range(12)]
plan = ModelExecutePlan(blocks[:-1], blocks[::-1])


def train(share, keep):
    """Losses, bytes that each step uploads, and bytes that stay."""
    model = make_model()
    device = VirtualDevice(memory_limit=int(share * weights))
    config = RoundPipeRunConfig(
        loss_reduction="mean", keep_parameters=keep, execute_plan=plan
    )
    pipe = RoundPipe(model, devices=[device], model_run_config=config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    inputs = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    losses, uploaded = [], []
    for _ in range(STEPS):
        before = pipe.parameter_traffic.uploaded
        loss = pipe.forward_backward(
            (inputs,), label=inputs, loss_fn=nn.functional.mse_loss
        )
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        losses.append(loss.item())
        uploaded.append(pipe.parameter_traffic.uploaded - before)
    kept = pipe.parameter_traffic.kept[device.name]
    pipe.close()
    return losses, uploaded, kept


ways = {"none stay, 1.0 x": (1.0, 0)}
ways |= {f"auto, {share} x": (share, "auto") for share in (0.5, 1.0, 1.5, 2.0)}
found = {name: train(*way) for name, way in ways.items()}
for name, (_, uploaded, kept) in found.items():
    print(f"{name:16} {uploaded[-1] / 1e6:5.2f} MB up, {kept / 1e6:5.2f} MB stay")

# %%
# The losses are bitwise identical:

print(len({tuple(losses) for losses, _, _ in found.values()}))

# %%
# Uploaded bytes
# --------------
#
# The first step copies all weights to the device. Later steps copy changed weights, and weights that the device has no
# memory to keep.

figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
for (name, (_, uploaded, _)), colour in zip(
    found.items(), ["#bbbbbb", "#ee6677", "#ccbb44", "#228833", "#4477aa"], strict=True
):
    steps = range(1, STEPS + 1)
    ax.plot(steps, [n / 1e6 for n in uploaded], ".-", color=colour, label=name)
ax.axhline(trained / 1e6, color="#999999", linewidth=1, linestyle=":")
ax.annotate(
    "what trains",
    (STEPS, trained / 1e6),
    xytext=(-4, 4),
    ha="right",
    textcoords="offset points",
)
ax.set(xlabel="step", ylabel="MB uploaded", xticks=steps, ylim=(0, 11))
ax.legend(title="memory of the device, in weights", loc="upper right")
plt.show()
