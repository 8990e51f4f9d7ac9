"""
A pipeline beside plain training
================================

A small transformer reads bytes. It is trained twice from the same weights: plainly, and through a pipeline over two
devices that holds a few layers on a device at a time. The losses are drawn over each other, and below them what ran
where and when.
"""

# %%
# The text
# --------
#
# Source code that is there wherever torch is: the file of ``nn.Module``, as bytes.

import inspect

import matplotlib.pyplot as plt
import torch
from torch import nn

from roundpipe_runtime import OptimizerCtx, RoundPipe, RoundPipeRunConfig, Timeline, optim

text = torch.tensor(list(inspect.getsource(nn.Module).encode()))
LENGTH, ROWS, STEPS = 32, 10, 40


def batches(seed):
    """``(inputs, labels)`` of 10 rows, which 3 microbatches cannot share evenly."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - LENGTH - 1, (ROWS,), generator=generator)
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        yield rows[:, :-1], rows[:, 1:]


# %%
# The model
# ---------
#
# A list of layers, each with one input and one output: an ``nn.Sequential``.


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=later, need_weights=False)[0]
        return x + self.feed(x)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, 32), *[Block(32) for _ in range(4)], nn.LayerNorm(32), nn.Linear(32, 256))


def loss_fn(outputs, labels):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


# %%
# Plain training
# --------------

model = build()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
plain = []
for inputs, labels in batches(seed=1):
    loss = loss_fn(model(inputs), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    plain.append(loss.item())

# %%
# The pipeline
# ------------
#
# The loop has one call for forward and backward, and one for the step. ``loss_reduction="mean"`` says that ``loss_fn``
# returns a mean over its rows; the total is then the mean over the batch, for microbatches of 4, 3 and 3 rows too.

pipeline = RoundPipe(build(), devices="virtual:2", model_run_config=RoundPipeRunConfig(loss_reduction="mean"))
with OptimizerCtx():
    optimizer = optim.Adam(pipeline.parameters(), lr=3e-3)
piped = []
for inputs, labels in batches(seed=1):
    loss = pipeline.forward_backward((inputs,), label=labels, loss_fn=loss_fn)
    pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    piped.append(loss.item())

print(f"last loss: plain {plain[-1]:.5f}, pipeline {piped[-1]:.5f}")
print(f"largest difference of any step: {max(abs(a - b) for a, b in zip(plain, piped, strict=True)):.1e}")

# %%
# What ran where
# --------------
#
# One more run, recorded. Rows are devices, letters are work: ``F`` forward, ``R`` forward again, ``L`` loss, ``B``
# backward, ``u`` and ``d`` copies of parameters and gradients.

with Timeline() as timeline:
    pipeline.forward_backward((inputs,), label=labels, loss_fn=loss_fn)
print(timeline.draw())
pipeline.close()

# %%
# Both in one picture
# -------------------

COLOURS = {"forward": "#4477aa", "recompute": "#66ccee", "loss": "#ccbb44", "backward": "#ee6677"}
COLOURS |= {"upload": "#dddddd", "download": "#bbbbbb"}
figure, (curves, rows) = plt.subplots(2, 1, figsize=(8, 5), height_ratios=[2, 1], layout="constrained")
curves.plot(plain, color="black", linewidth=3, alpha=0.3, label="plain")
curves.plot(piped, color="#ee6677", linewidth=1, label="pipeline, 2 devices")
curves.set(xlabel="step", ylabel="loss")
curves.legend()

first = min(record.start for record in timeline.records)
devices = sorted({record.device for record in timeline.records})
for record in timeline.records:
    left, width = 1000 * (record.start - first), 1000 * (record.end - record.start)
    rows.barh(
        devices.index(record.device), width, left=left, color=COLOURS[record.kind], edgecolor="white", linewidth=0.2
    )
rows.set(yticks=range(len(devices)), yticklabels=devices, xlabel="ms")
rows.invert_yaxis()
handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
rows.legend(handles, COLOURS, ncols=3, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, 1.55))
plt.show()
