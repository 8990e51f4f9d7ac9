"""
Stages, microbatches, schedules: drawn
======================================

A batch is split into *microbatches*, and the layers of a model are grouped into *stages*. The *schedule* is the order
in which devices run stages on microbatches. This page draws schedules; nothing is trained. The words are explained in
:doc:`../../guide/runtime_plan`.
"""

# %%
# One iteration
# -------------
#
# The model has seven equal layers, and runs on two devices in three microbatches. The forward of a layer takes 1 unit
# of time; its backward, which also recomputes the forward, takes 3. Therefore forward stages have three layers, and
# backward stages have one layer.

import matplotlib.pyplot as plt

from roundpipe_runtime import ModelExecutePlan
from roundpipe_runtime.schedule import (
    Machine,
    RoundRobin,
    StageLoad,
    simulate,
    steps_in_order,
)

# sphinx_gallery_thumbnail_number = 1
FORWARD, BACKWARD = 1.0, 3.0
COLOURS = {"forward": "#4477aa", "fused": "#ccbb44", "backward": "#ee6677"}


def seconds(stage):
    return len(stage.layers) * (FORWARD if stage.kind == "forward" else BACKWARD)


def timed(stages, devices, microbatches):
    """``(step, start, end)`` of each step: it waits for its device and for the same microbatch in the stage before."""
    free, done = {}, [0.0] * microbatches
    for step in steps_in_order(devices, microbatches):
        start = max(free.get(step.device, 0.0), done[step.microbatch])
        end = start + seconds(stages[step.stage])
        free[step.device] = done[step.microbatch] = end
        yield step, start, end


def draw(ax, stages, num_devices, microbatches):
    last, busy = 0.0, 0.0
    for step, start, end in timed(
        stages, RoundRobin(num_devices).assign(len(stages)), microbatches
    ):
        stage = stages[step.stage]
        shade = 1 - 0.25 * step.microbatch / max(microbatches - 1, 1)
        ax.barh(
            step.device,
            end - start,
            left=start,
            color=COLOURS[stage.kind],
            alpha=shade,
            edgecolor="white",
            height=0.9,
        )
        first, final = stage.layers[0], stage.layers[-1]
        layers = f"{first}" if first == final else f"{first}-{final}"
        ax.text(
            (start + end) / 2,
            step.device,
            f"{layers}\nm{step.microbatch}",
            ha="center",
            va="center",
            fontsize=7,
        )
        last, busy = max(last, end), busy + end - start
    ax.set(
        yticks=range(num_devices),
        yticklabels=[f"device {n}" for n in range(num_devices)],
        xlim=(0, last),
    )
    ax.invert_yaxis()
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.set_title(
        f"{microbatches} microbatch{'es' * (microbatches > 1)}, bubble {1 - busy / (num_devices * last):.0%}",
        loc="left",
        fontsize=10,
    )


plan = ModelExecutePlan(
    fwd_plan=[range(3), range(3, 6)],
    bwd_plan=[
        range(6, 7),
        range(5, 6),
        range(4, 5),
        range(3, 4),
        range(2, 3),
        range(1, 2),
        range(1),
    ],
)
stages = plan.stages("fused", num_layers=7)
figure, ax = plt.subplots(figsize=(9, 2.4), layout="constrained")
draw(ax, stages, num_devices=2, microbatches=3)
ax.set_xlabel("time of a layer's forward")
handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
figure.legend(
    handles,
    ["forward", "forward, loss and backward", "forward again and backward"],
    loc="outside lower center",
    ncols=3,
    frameon=False,
)
plt.show()

# %%
# Numbers are layers; ``m0`` is the first microbatch. A stage stays on its device until all microbatches have passed.
# Then the device takes the next stage in order; no layer belongs to a fixed device. White areas are the *bubble*, time
# in which a device waits.
#
# Why microbatches
# ----------------
#
# An unsplit batch is on one device at a time, and the other device waits. With as many microbatches as devices, devices
# wait only at the start and the end; with one more microbatch, as in the picture above, copies overlap with compute.

figure, axes = plt.subplots(2, 1, figsize=(9, 3.8), layout="constrained")
for ax, microbatches in zip(axes, (1, 2), strict=True):
    draw(ax, stages, num_devices=2, microbatches=microbatches)
plt.show()

# %%
# Why stages have equal lengths
# -----------------------------
#
# This schedule has the same layers, with the last five layers in one stage: the other device waits for this stage.

uneven = ModelExecutePlan(fwd_plan=[range(2)], bwd_plan=[range(2, 7), range(2)]).stages(
    "fused", num_layers=7
)
figure, ax = plt.subplots(figsize=(9, 1.9), layout="constrained")
draw(ax, uneven, num_devices=2, microbatches=3)
plt.show()

# %%
# Why more stages than devices
# ----------------------------
#
# Devices wait at both ends of an iteration only. With more stages per device, devices wait for a smaller share of the
# time. The picture has equal stages on four devices. For solid lines, copies take no time. For dotted lines, loading a
# stage takes as long as computing the stage for four microbatches.

MICROBATCHES, LOADED = 5, 4
figure, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
counts = range(4, 41, 4)
for label, style, size in (
    ("copies for nothing", "-", 0),
    ("copies over a link", ":", LOADED),
):
    bubbles = [
        simulate(
            [StageLoad(compute=1.0, upload=size) for _ in range(count)],
            Machine(num_devices=4, link=1),
            MICROBATCHES,
        ).bubble
        for count in counts
    ]
    ax.plot(
        counts,
        [100 * bubble for bubble in bubbles],
        style,
        color="#4477aa",
        marker="o",
        label=label,
    )
ax.set(
    xlabel="stages of an iteration", ylabel="bubble, %", xticks=counts, ylim=(0, 100)
)
ax.legend()
plt.show()
