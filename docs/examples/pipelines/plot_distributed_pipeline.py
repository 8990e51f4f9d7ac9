"""
Custom types between machines
=============================

The stages of ``torch.distributed.pipelining`` send tensors. ``DistributedPipeline`` lets them send any registered
object: a dataclass, a cache, a model output. This page trains two stages. Run it in one process, as on this page, or in
two processes:

.. code-block:: bash

    torchrun --nproc-per-node=2 plot_distributed_pipeline.py
"""

# %%
# The class that is sent
# ----------------------
#
# The dataclass has a tensor with gradients, a tensor without, and a static part.

import copy
import os

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from roundpipe_runtime.distributed.stages.pipeline import DistributedPipeline
from yobx_flatten import pytree_dataclass, static_field


@pytree_dataclass
class State:
    hidden: torch.Tensor
    mask: torch.Tensor
    language: str = static_field(default="en")


class Read(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 16)

    def forward(self, ids):
        return State(self.table(ids), ids != 0, language="en")


class Answer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 3)

    def forward(self, state):
        assert state.language == "en"
        hidden = state.hidden * state.mask.unsqueeze(-1)
        return self.linear(torch.tanh(hidden).mean(1))


# %%
# The stages of this process
# --------------------------
#
# ``torchrun`` sets the rank of this process. Every process makes the pipeline, with its own stages. The shapes that
# a stage returns are computed without running the stage, and must not change later. Stages may be
# ``RoundPipe`` pipelines, for layers that do not fit on the devices of their machine.

rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if size == 1:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
else:
    dist.init_process_group("gloo")

torch.manual_seed(0)
modules = [Read(), Answer()]
reference = copy.deepcopy(nn.ModuleList(modules))
ids = torch.randint(256, (12, 6))
labels = torch.randint(3, (12,))

pipeline = DistributedPipeline(
    {stage: modules[stage] for stage in range(2) if stage % size == rank},
    Schedule1F1B if size == 2 else ScheduleInterleaved1F1B,
    num_microbatch=4,
    loss_fn=nn.functional.cross_entropy,
    loss_reduction="mean",
    example_args=(ids,) if rank == 0 else (),
)
print(
    f"process {rank} of {size} runs the stages {[s.stage_index for s in pipeline.stages]}"
)

# %%
# A step
# ------
#
# All processes make the same call. The first stage uses the arguments; the last stage uses the labels and returns the
# loss. Loss and gradients are those of the model in one process, microbatch by microbatch.

loss = pipeline.forward_backward(
    (ids,) if rank == 0 else (),
    label=labels if rank == size - 1 else None,
)
for part, wanted in zip(ids.split(3), labels.split(3), strict=True):
    outputs = reference[1](reference[0](part))
    (nn.functional.cross_entropy(outputs, wanted) / 4).backward()
same = [
    torch.equal(parameter.grad, expected.grad)
    for stage in pipeline.stages
    for parameter, expected in zip(
        modules[stage.stage_index].parameters(),
        reference[stage.stage_index].parameters(),
        strict=True,
    )
]
print(f"bitwise identical gradients: {same}")
if loss is not None:
    print(f"loss {loss.item():.4f}")

# %%
# Which process runs what, and when
# ---------------------------------
#
# With one forward and one backward in turn (1F1B), the first of two processes runs one microbatch ahead. A backward
# is drawn twice as long as a forward.

ends, free, drawn = {}, [0, 0], []
waiting = [list("FFBFBFBB"), list("FBFBFBFB")]
count = [{"F": 0, "B": 0}, {"F": 0, "B": 0}]
while any(waiting):
    for stage in range(2):
        while waiting[stage]:
            kind = waiting[stage][0]
            number = count[stage][kind]
            before = (1 - stage, kind, number)  # where its input comes from
            is_end = (stage == 0) == (kind == "F")
            if not is_end and before not in ends:
                break
            start = max(free[stage], 0 if is_end else ends[before])
            free[stage] = start + (1 if kind == "F" else 2)
            ends[stage, kind, number] = free[stage]
            drawn.append((stage, kind, number, start))
            count[stage][kind] += 1
            waiting[stage].pop(0)

figure, ax = plt.subplots(figsize=(8, 1.8), layout="constrained")
for stage, kind, number, start in drawn:
    width, colour = (1, "#4477aa") if kind == "F" else (2, "#ee6677")
    ax.barh(stage, width, left=start, color=colour, edgecolor="white")
    ax.text(start + width / 2, stage, f"{kind}{number}", ha="center", va="center")
ax.set(yticks=[0, 1], yticklabels=["process 0", "process 1"], xticks=[])
ax.invert_yaxis()
for side in ax.spines.values():
    side.set_visible(False)
plt.show()

# %%
# What cannot be sent
# -------------------
#
# Sizes and static parts are fixed by the first call. The first process refuses a batch whose microbatches have other sizes,
# before anything is sent:

if rank == 0:
    try:
        pipeline.forward_backward((ids[:8],))
    except ValueError as error:
        print(f"{type(error).__name__}: {error}")

dist.destroy_process_group()
