"""
A pipeline next to plain training
=================================

A small transformer for bytes is trained twice from the same weights: with PyTorch alone, and through a pipeline over two
devices that run a few layers at a time. The page draws both losses in one picture, and below them a timeline of the
devices.
"""

# %%
# The text
# --------
#
# The training data are the help pages that come with Python, as bytes.

from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from torch import nn

from roundpipe_runtime import (
    OptimizerCtx,
    RoundPipe,
    RoundPipeRunConfig,
    Timeline,
    optim,
)

torch.set_num_threads(
    1
)  # operations this small lose more by being shared out than they gain
text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
LENGTH, ROWS, STEPS, WIDTH = 64, 10, 40, 64


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
# The model is an ``nn.Sequential``: a list of layers, each with one input and one output.


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attention = (
            nn.LayerNorm(width),
            nn.MultiheadAttention(width, 4, batch_first=True),
        )
        self.feed = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
        )

    def forward(self, x):
        later = torch.ones(
            x.shape[1], x.shape[1], dtype=torch.bool, device=x.device
        ).triu(1)
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=later, need_weights=False)[0]
        return x + self.feed(x)


def build():
    torch.manual_seed(0)
    first, last = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
    return nn.Sequential(
        first, *[Block(WIDTH) for _ in range(4)], nn.LayerNorm(WIDTH), last
    )


def loss_fn(outputs, labels):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


# %%
# Plain training
# --------------

model = build()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
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
# The training loop has one call for forward and backward, and one call for the optimizer step. With
# ``loss_reduction="mean"``, ``loss_fn`` returns a mean over its rows, and the result is the mean over the batch, also
# for microbatches of 4, 3 and 3 rows.

pipeline = RoundPipe(
    build(),
    devices="virtual:2",
    model_run_config=RoundPipeRunConfig(loss_reduction="mean"),
)
with OptimizerCtx():
    optimizer = optim.Adam(pipeline.parameters(), lr=3e-3)
piped = []
for inputs, labels in batches(seed=1):
    loss = pipeline.forward_backward((inputs,), label=labels, loss_fn=loss_fn)
    pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    piped.append(loss.item())

print(f"last loss: plain {plain[-1]:.5f}, pipeline {piped[-1]:.5f}")
print(
    f"largest difference of any step: {max(abs(a - b) for a, b in zip(plain, piped, strict=True)):.1e}"
)

# %%
# The timeline of the devices
# ---------------------------
#
# A few more runs are recorded, and the fastest is drawn. Each row is a device. The letters are: ``F`` is forward, ``R``
# recomputation, ``L`` loss and ``B`` backward; ``u`` and ``d`` are copies of parameters to a device and of gradients
# back.


def record():
    with Timeline() as timeline:
        pipeline.forward_backward((inputs,), label=labels, loss_fn=loss_fn)
    return timeline


def seconds(timeline):
    return max(record.end for record in timeline.records) - min(
        record.start for record in timeline.records
    )


timeline = min((record() for _ in range(10)), key=seconds)
pipeline.close()
print(timeline.draw(100))

# %%
# Losses and timeline in one picture
# ----------------------------------
#
# At the top of the picture, the two loss curves coincide. The middle shows their difference, which is the rounding
# error of float32, because sums are computed per microbatch. The bottom shows the recorded run; the numbers in it are
# microbatches.

COLOURS = {
    "forward": "#4477aa",
    "recompute": "#66ccee",
    "loss": "#ccbb44",
    "backward": "#ee6677",
}
COLOURS |= {"upload": "#dddddd", "download": "#bbbbbb"}
figure, (curves, between, rows) = plt.subplots(
    3, 1, figsize=(8, 7), height_ratios=[3, 1.2, 1.8], layout="constrained"
)
curves.plot(plain, color="black", linewidth=4, alpha=0.25, label="plain")
curves.plot(piped, color="#ee6677", linewidth=1, label="pipeline, 2 devices")
curves.set(ylabel="loss")
curves.legend()
between.bar(
    range(STEPS),
    [abs(a - b) for a, b in zip(plain, piped, strict=True)],
    color="#888888",
)
between.set(xlabel="step", ylabel="difference", xlim=curves.get_xlim())

start = min(record.start for record in timeline.records)
devices = sorted({record.device for record in timeline.records})
numbered = {}
for record in timeline.records:
    row, left, width = (
        devices.index(record.device),
        1000 * (record.start - start),
        1000 * (record.end - record.start),
    )
    rows.barh(
        row,
        width,
        left=left,
        color=COLOURS[record.kind],
        edgecolor="white",
        linewidth=0.2,
    )
    if record.microbatch >= 0:
        numbered.setdefault((row, record.stage, record.microbatch), []).append(
            (left, left + width)
        )
for (row, _, microbatch), spans in numbered.items():
    middle = (min(left for left, _ in spans) + max(right for _, right in spans)) / 2
    rows.text(
        middle, row, microbatch, ha="center", va="center", fontsize=8, clip_on=True
    )
rows.set(yticks=range(len(devices)), yticklabels=devices, xlabel="ms")
rows.invert_yaxis()
handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
rows.legend(
    handles,
    COLOURS,
    ncols=6,
    fontsize="small",
    loc="lower center",
    bbox_to_anchor=(0.5, 1.0),
    frameon=False,
)
plt.show()
