"""
Losses that compare rows with each other
========================================

A contrastive loss compares each row with all others of its batch, so the losses of microbatches do not add up to the
loss of the batch. A pipeline refuses such a loss in microbatches, and computes it once for the whole batch with
``loss_reduction="joined"``. This page trains in both ways, and compares with the same layers without a pipeline.
"""

# %%
# Pairs to distinguish
# --------------------
#
# Each input has a partner. The layers map the input to a vector. The loss is small if the vector is close to the partner
# of its row and far from the partners of all other rows.

import copy

import matplotlib.pyplot as plt
import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeError, RoundPipeRunConfig

ROWS, STEPS = 24, 40

torch.manual_seed(0)
plain = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
inputs = torch.randn(ROWS, 16)
partners = nn.functional.normalize(inputs @ torch.randn(16, 16), dim=1)


def contrast(outputs, labels):
    scores = nn.functional.normalize(outputs, dim=1) @ labels.T / 0.1
    return nn.functional.cross_entropy(scores, torch.arange(len(outputs)))


# %%
# Microbatches would change the loss
# ----------------------------------
#
# With three microbatches, each row would be compared with seven others instead of 23. The pipeline detects this in its
# first run: the loss of some rows together differs from the mean of the losses of parts of these rows.

model = RoundPipe(copy.deepcopy(plain), devices="virtual:2")
in_parts = RoundPipeRunConfig(num_microbatch=3, loss_reduction="mean")
try:
    model.forward_backward(
        (inputs,), label=partners, loss_fn=contrast, run_config=in_parts
    )
except RoundPipeError as error:
    print(error)

# %%
# Once for the whole batch
# ------------------------
#
# The layers still run in microbatches. Their outputs are joined, the loss function is called once, and the backward
# runs in microbatches again.

joined = RoundPipeRunConfig(num_microbatch=3, loss_reduction="joined")


def train(step, parameters):
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    losses = []
    for _ in range(STEPS):
        losses.append(step().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def plain_step():
    loss = contrast(plain(inputs), partners)
    loss.backward()
    return loss.detach()


def pipeline_step():
    return model.forward_backward(
        (inputs,), label=partners, loss_fn=contrast, run_config=joined
    )


losses = {
    "pipeline, three microbatches": train(pipeline_step, model.parameters()),
    "layers without a pipeline": train(plain_step, plain.parameters()),
}
apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
print(f"largest difference of {STEPS} losses: {apart:.1e}")
model.close()

# %%
figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for (name, values), style in zip(losses.items(), ["-", ":"], strict=True):
    axes.plot(values, style, label=name, linewidth=2)
axes.set(xlabel="step", ylabel="contrastive loss")
axes.legend()
plt.show()

# %%
# Hugging Face models need no option. In the first call of each kind, the pipeline checks how the losses of microbatches
# add up (:doc:`/guide/runtime_loss`). For CLIP, for example, the loss is then computed once for the whole batch.
