"""
How a Hugging Face model is split, drawn
========================================

A Hugging Face model is split into *pieces*: its layers, and *phases*, which are the model's own code before, between
and after the layers. This page draws the pieces of four models, and every tensor that passes between them. The words
*piece* and *phase* are explained in :doc:`../../guide/runtime_huggingface`.

The models are as wide as the real ones, and have a few layers. The weights of three of the models are on the device
``meta``: they have shapes, and need no memory.
"""

# %%
# Two calls
# ---------
#
# ``cut`` splits the model and returns the sizes of the pieces. ``passed_tensors`` runs the pieces on an example, and returns
# for each tensor the piece that makes it and the pieces that get it.

import matplotlib.pyplot as plt
import torch
from transformers import (
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from roundpipe_runtime import cut
from roundpipe_runtime.huggingface import passed_tensors

ROWS, LENGTH = 4, 1024  # of a microbatch


def on_meta(kind, config):
    with torch.device("meta"):
        return kind(config).to(torch.bfloat16)


def example(**more):
    """Tokens and a mask for all pairs of them, as there are rows with padding."""
    mask = torch.zeros(ROWS, 1, LENGTH, LENGTH, dtype=torch.bfloat16)
    return {
        "input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64),
        "attention_mask": mask,
        **more,
    }


model, batch = on_meta(LlamaForCausalLM, LlamaConfig(num_hidden_layers=4)), example()
pieces = cut(model, batch)
print(pieces.report)
for tensor in passed_tensors(pieces, batch)[:4]:
    print(
        f"{tensor.kind:8} {tensor.name:24} {tensor.bytes / 1e6:5.1f} MB, made by {tensor.made}, for {tensor.read}"
    )

# %%
# The drawing
# -----------
#
# The top of the picture shows the pieces, in the order in which they run, with the bytes of their parameters. Below,
# each row is a tensor: a dot marks the piece that makes the tensor, and a ring marks each piece that gets the tensor.
# Along the line between them, the tensor is passed on with the microbatch. The bottom of the picture shows the bytes
# that each piece passes to the next piece.

KINDS = {
    "hidden": ("#222222", "hidden state, from layer to layer"),
    "side": ("#4477aa", "side input, made by the model's own code"),
    "carried": ("#ee6677", "carried from a layer to later ones"),
    "captured": ("#228833", "captured in a layer, for the output"),
}
PHASE, LISTS = "#bbbbbb", ("#ccbb44", "#ddaa77")


def size(count):
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"


def rows_of(tensors):
    """Tensors that share a row: the parts of a tuple, and those of one name and size that follow each other."""
    spans = {}
    for tensor in tensors:
        name = tensor.name.removesuffix("[0]").removesuffix("[1]")
        spans.setdefault((tensor.kind, name, tensor.made, tensor.read), []).append(
            tensor
        )
    rows = {}
    for (kind, name, made, read), parts in spans.items():
        span = made, read, sum(part.bytes for part in parts)
        lanes = rows.setdefault((kind, name), [])
        free = next(
            (
                lane
                for lane in lanes
                if lane[-1][1][-1] <= made and lane[-1][2] == span[2]
            ),
            None,
        )
        if free is None:
            lanes.append(free := [])
        free.append(span)
    order = list(KINDS)
    return sorted(
        ((kind, name, lane) for (kind, name), lanes in rows.items() for lane in lanes),
        key=lambda row: order.index(row[0]),
    )


def draw_pieces(ax, report):
    tallest = max(report.bytes)
    for number, (piece, held) in enumerate(
        zip(report.pieces, report.bytes, strict=True)
    ):
        path, _, index = piece.rpartition(".")
        colour = LISTS[report.lists.index(path)] if path else PHASE
        ax.bar(number, held, width=0.82, color=colour)
        ax.text(
            number,
            held + 0.04 * tallest,
            size(held),
            ha="center",
            va="bottom",
            fontsize=8,
        )
        ax.text(
            number,
            -0.07 * tallest,
            f"layer {index}" if path else piece,
            ha="center",
            va="top",
            fontsize=9,
        )
    for path, colour in zip(report.lists, LISTS, strict=False):
        ax.bar(0, 0, color=colour, label=path)
    ax.bar(0, 0, color=PHASE, label="the model's own code")
    ax.legend(
        frameon=False,
        fontsize=8,
        ncols=3,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.08),
        borderaxespad=0,
    )
    ax.set(ylim=(0, 1.2 * tallest), yticks=[], xticks=[], ylabel="parameters")
    ax.yaxis.label.set(rotation=0, ha="right", va="center", fontsize=9)


def draw_tensors(ax, rows, count):
    handed = [0] * (count - 1)
    for place, (kind, _, lane) in enumerate(rows):
        colour = KINDS[kind][0]
        for made, read, held in lane:
            ax.plot(
                [made, read[-1]],
                [place, place],
                color=colour,
                lw=1.6,
                solid_capstyle="round",
                zorder=1,
            )
            ax.plot(
                read,
                [place] * len(read),
                "o",
                ms=6,
                mec=colour,
                mfc="white",
                mew=1.4,
                zorder=2,
            )
            for number in range(made, read[-1]):
                handed[number] += held
        made = [span[0] for span in lane]
        ax.plot(made, [place] * len(made), "o", ms=6, color=colour, zorder=3)
        ax.text(
            count - 0.35, place, size(lane[0][2]), va="center", fontsize=8, color=colour
        )
    for number, held in enumerate(handed):
        ax.text(
            number + 0.5,
            len(rows) + 0.05,
            size(held),
            ha="center",
            va="center",
            fontsize=8,
        )
    names = [
        name.removeprefix("shared_").replace("['", ", ").replace("']", "")
        for _, name, _ in rows
    ]
    ax.set(
        yticks=[*range(len(rows)), len(rows) + 0.05],
        yticklabels=[*names, "handed on"],
        xticks=[],
    )
    for label, row in zip(ax.get_yticklabels(), rows, strict=False):
        label.set_color(KINDS[row[0]][0])
    ax.tick_params(axis="y", length=0, labelsize=9)
    ax.set(xlim=(-0.5, count - 0.5), ylim=(len(rows) + 0.55, -0.6))
    for number in range(count):
        ax.axvspan(number - 0.41, number + 0.41, color="#f2f2f2", zorder=0, lw=0)


def draw(model, batch):
    made = cut(model, batch)
    rows = rows_of(passed_tensors(made, batch))
    count = len(made.report.pieces)
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 2.4 + 0.26 * len(rows)), height_ratios=[1.1, 0.24 * len(rows) + 0.5], sharex=True,
        layout="constrained",
    )  # fmt: skip
    draw_pieces(above, made.report)
    draw_tensors(below, rows, count)
    for ax in (above, below):
        for side in ax.spines.values():
            side.set_visible(False)
    used = [kind for kind in KINDS if any(row[0] == kind for row in rows)]
    lines = [
        plt.Line2D([], [], color=KINDS[kind][0], lw=1.6, marker="o") for kind in used
    ]
    figure.legend(
        lines,
        [KINDS[kind][1] for kind in used],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=8,
    )
    return figure


# %%
# Llama
# -----
#
# Phase 0 embeds the tokens and makes the mask and positions that all layers share. Phase 1 runs the model's forward
# again, with the outputs of the layers instead of the layers: it contains the embedding again, the norm and the head.

draw(model, batch)
plt.show()

# %%
# Mixtral, with the logits of its routers
# ---------------------------------------
#
# Almost all bytes are in the layers, and a device needs room for at least one layer. The logits of each router are
# passed to the end, where the model computes a loss from them. The loss of the routers depends on values, so this model
# is small and its weights are not on ``meta``.

config = MixtralConfig(
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=8,
    num_hidden_layers=4,
    vocab_size=1000,
)
mixtral = MixtralForCausalLM(config).eval()
draw(
    mixtral,
    {
        "input_ids": torch.zeros(ROWS, 64, dtype=torch.int64),
        "output_router_logits": True,
    },
)
plt.show()

# %%
# Gemma 3n, whose last layers have no keys of their own
# -----------------------------------------------------
#
# The last layers of Gemma 3n read the keys of earlier layers from a dictionary. Each layer also has its own additional
# input, and sliding layers have other position embeddings than full layers.

config = Gemma3nTextConfig(
    num_hidden_layers=4,
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
draw(on_meta(Gemma3nForCausalLM, config), example())
plt.show()

# %%
# T5, an encoder and a decoder
# ----------------------------
#
# The norm of the encoder is between the two lists of layers, so there is a phase between them. The first layer of
# each list computes the bias of the positions, and the other layers pass it on.

batch = {"input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64)}
batch["decoder_input_ids"] = batch["input_ids"][:, :256]
# sphinx_gallery_thumbnail_number = 3
draw(on_meta(T5ForConditionalGeneration, T5Config(num_layers=3)), batch)
plt.show()
