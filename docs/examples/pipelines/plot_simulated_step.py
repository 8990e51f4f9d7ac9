"""
What a step waits for
=====================

A training step computes, copies parameters to the devices and gradients back, and runs the optimizer on the host. The
part that takes longest is the bottleneck; the number of tokens decides which part this is. The first half of this page
simulates a step on a machine with two GPUs. The second half trains on simulated devices and draws what each device did.
"""

# %%
# A simulated machine
# -------------------
#
# The model has sixteen layers of 200 million parameters each, on the device ``meta``, so nothing is allocated. The
# machine has two GPUs with a link of 25 GB/s each.

import matplotlib.pyplot as plt
import torch
from torch import nn

from roundpipe_runtime import (
    ModelExecutePlan,
    OptimizerCtx,
    RoundPipe,
    RoundPipeRunConfig,
    Timeline,
)
from roundpipe_runtime.estimate import Hardware, measure_layers, simulate, step_plan

WIDTH, MICROBATCHES = 5120, 4


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        options = {"bias": False, "dtype": torch.bfloat16, "device": "meta"}
        self.up = nn.Linear(WIDTH, 4 * WIDTH, **options)
        self.down = nn.Linear(4 * WIDTH, WIDTH, **options)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


model = nn.Sequential(*[FeedForward() for _ in range(16)])
plan = ModelExecutePlan.auto("fused", model, min_stages=2)
machine = Hardware(
    names=("cuda:0", "cuda:1"),
    kind="cuda",
    flops=150e12,
    link=25e9,
    memory=12 * 10**9,
    host=128 * 10**9,
    host_rate=100e9,
    origin={},
)


def simulated(tokens):
    rows = torch.empty(
        tokens // MICROBATCHES, WIDTH, dtype=torch.bfloat16, device="meta"
    )
    layers = measure_layers(list(model), (rows,))
    step = step_plan(plan, layers, model, num_microbatch=MICROBATCHES, tokens=tokens)
    return simulate(step, machine, is_async="exact")


counts = [2**power for power in range(10, 18)]
steps = [simulated(tokens) for tokens in counts]
for tokens, step in zip(counts, steps, strict=True):
    print(f"{tokens:,} tokens: {step.bottleneck} is busy longest")

# %%
# The picture shows the seconds of a step, and how long each part of the machine is busy. Copies of parameters and the
# optimizer take the same time for any number of tokens. Computation grows with the tokens, and becomes the bottleneck.

colours = {
    "compute": "#4477aa",
    "link up": "#228833",
    "link down": "#66ccee",
    "optimizer": "#aa3377",
}
figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
for name, colour in colours.items():
    ax.plot(counts, [step.busy[name] for step in steps], color=colour, label=name)
ax.plot(counts, [step.seconds for step in steps], "k.--", label="a step")
ax.set(xscale="log", yscale="log", xlabel="tokens of a step", ylabel="seconds")
ax.legend()
plt.show()

# %%
# The devices during this step:

shares = {"compute": [1 - sum(step.bubbles.values()) for step in steps]}
for cause in ("transfer", "optimizer", "dependency"):
    shares[cause] = [step.bubbles[cause] for step in steps]
figure, ax = plt.subplots(figsize=(8, 3), layout="constrained")
ax.stackplot(
    counts,
    shares.values(),
    labels=shares,
    colors=["#4477aa", "#e0b24c", "#b78ad0", "#c9d0d8", "#d97b66"],
)
ax.set(xscale="log", xlabel="tokens of a step", ylabel="share of the time", ylim=(0, 1))
ax.legend(loc="lower right")
plt.show()

# %%
# A recorded training
# -------------------
#
# Two steps on two simulated devices are recorded and drawn. ``timeline.save("run.json")`` writes a file that
# `Perfetto <https://ui.perfetto.dev>`_ opens.

torch.set_num_threads(1)
layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)], nn.Linear(256, 1024))
config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=4)
pipe = RoundPipe(layers, devices="virtual:2", model_run_config=config)
with OptimizerCtx():
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
inputs, labels = torch.randn(256, 256), torch.randn(256, 1024)


def train():
    pipe.forward_backward((inputs,), label=labels, loss_fn=nn.functional.mse_loss)
    pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))


for _ in range(3):
    train()
with Timeline() as timeline:
    train()
    train()
pipe.close()

print(timeline.draw(100))
