"""
Custom types, split and joined
==============================

A pipeline splits its arguments into microbatches and joins the outputs. This page passes several types: a dataclass,
optional fields, nested containers, a class written the JAX way, a cache and a transformers output. It draws which tensors
are split and which are passed whole to every microbatch, and shows which arguments are refused.
"""

# %%
# The classes
# -----------
#
# Registered classes are split. There are three ways to register: functions, a decorator that reads the fields, and
# methods as in JAX.

from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils._pytree import register_pytree_node
from transformers.modeling_outputs import CausalLMOutputWithPast

from roundpipe_runtime import Replicate, RoundPipe, RoundPipeRunConfig
from roundpipe_runtime.batch import join, split
from yobx_flatten import (
    leaves,
    make_dynamic_cache,
    pytree_dataclass,
    register_flattening_functions,
    register_pytree_node_class,
    static_field,
    string_type,
)


class FlexibleOutput:
    def __init__(self, logits, attentions=None):
        self.logits, self.attentions = logits, attentions


def flatten_flexible(obj):
    children = [obj.logits] if obj.attentions is None else [obj.logits, obj.attentions]
    return children, len(children)


register_pytree_node(
    FlexibleOutput, flatten_flexible, lambda children, count: FlexibleOutput(*children)
)


@pytree_dataclass
class Text:
    ids: torch.Tensor
    weights: torch.Tensor  # of the classes: three, however many rows there are
    language: str = static_field(default="en")


@register_pytree_node_class
@dataclass
class State:
    hidden: torch.Tensor
    extra: dict
    depth: int

    def tree_flatten(self):
        return (self.hidden, self.extra), self.depth

    @classmethod
    def tree_unflatten(cls, depth, children):
        return cls(*children, depth)


# %%
# One batch of all of them
# ------------------------
#
# The batch has ten rows. The cache is split along the axis that its registration declares, inside the block.

ROWS = 10
batch = {
    "text": Text(torch.zeros(ROWS, 6, dtype=torch.long), torch.ones(3)),
    "state": State(
        torch.zeros(ROWS, 6, 8),
        {"mask": torch.ones(1, 6), "scale": torch.tensor(2.0)},
        depth=1,
    ),
    "optional": FlexibleOutput(torch.zeros(ROWS, 3)),
    "output": CausalLMOutputWithPast(logits=torch.zeros(ROWS, 6, 3)),
    "cache": make_dynamic_cache(
        [(torch.zeros(ROWS, 2, 4, 8), torch.zeros(ROWS, 2, 4, 8))]
    ),
}
with register_flattening_functions(patch_transformers=True):
    parts = split((), batch, None, 3)
    before = leaves(batch, name="kwargs")
    after = [leaves(part.kwargs, name="kwargs") for part in parts]

print([part.rows for part in parts])
for name, value in parts[0].kwargs.items():
    print(f"{name:9}", string_type(value, with_shape=True))

# %%
# What is split, and what is not
# ------------------------------
#
# Each bar is a leaf, drawn along axis 0, with a color per microbatch. Grey leaves are passed whole to every microbatch, as
# the same object: class weights, a mask of one row that broadcasts, a number. The static parts (``language``,
# ``depth``) are also in every microbatch.

COLOURS = ["#4477aa", "#ee6677", "#ccbb44"]
figure, ax = plt.subplots(figsize=(8, 4.2), layout="constrained")
for row, (leaf, *cut) in enumerate(zip(before, *after, strict=True)):
    shape = tuple(leaf.value.shape)
    if all(part.value is leaf.value for part in cut):
        width = shape[0] if shape else 0.5
        ax.barh(row, width, color="#bbbbbb", edgecolor="white")
        ax.text(width + 0.15, row, f"{shape}, whole", va="center", fontsize=9)
        continue
    left = 0
    for part, colour in zip(cut, COLOURS, strict=True):
        count = part.value.shape[0]
        ax.barh(row, count, left=left, color=colour, edgecolor="white")
        ax.text(
            left + count / 2,
            row,
            f"{count}",
            ha="center",
            va="center",
            fontsize=9,
            color="white",
        )
        left += count
    ax.text(left + 0.15, row, f"{shape}", va="center", fontsize=9)
ax.set(yticks=range(len(before)), xticks=[], xlim=(0, ROWS + 2.5))
ax.set_yticklabels([leaf.path for leaf in before], family="monospace", fontsize=9)
ax.invert_yaxis()
ax.set_title("10 rows in 3 microbatches", loc="left", fontsize=11)
for side in ax.spines.values():
    side.set_visible(False)
plt.show()

# %%
# Joined again
# ------------
#
# Tensors are concatenated along the axis of the split. Leaves that were passed whole are returned whole.

with register_flattening_functions(patch_transformers=True):
    joined = join([part.kwargs for part in parts], [part.rows for part in parts])
    same = [
        torch.equal(one.value, two.value)
        for one, two in zip(before, leaves(joined), strict=True)
    ]
print(
    all(same),
    joined["text"].language,
    joined["state"].depth,
    joined["optional"].attentions,
)

# %%
# From layer to layer
# -------------------
#
# Layers pass the classes to each other, and the loss reads an attribute. The registration is all that the pipeline needs:
# the outputs are those of the reference model.


class Read(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 8)

    def forward(self, text):
        return State(self.table(text.ids), {"weights": text.weights}, depth=0)


class Think(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, state):
        return State(
            torch.tanh(self.linear(state.hidden)), state.extra, state.depth + 1
        )


class Answer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, state):
        return FlexibleOutput(
            self.linear(state.hidden.mean(1)) * state.extra["weights"]
        )


def loss_fn(outputs, labels):
    return nn.functional.cross_entropy(outputs.logits, labels)


torch.manual_seed(0)
model = nn.Sequential(Read(), Think(), Think(), Answer())
text = Text(torch.randint(256, (ROWS, 6)), torch.tensor([1.0, 2.0, 0.5]))
labels = torch.randint(3, (ROWS,))
plain = model(text)
plain_loss = loss_fn(plain, labels)

pipeline = RoundPipe(
    model,
    devices="virtual:2",
    model_run_config=RoundPipeRunConfig(loss_reduction="mean"),
)
loss, outputs = pipeline.forward_backward(
    (text,), label=labels, loss_fn=loss_fn, return_outputs=True
)
print(f"plain loss {plain_loss.item():.6f}, pipeline {loss.item():.6f}")
print(
    type(outputs).__name__,
    tuple(outputs.logits.shape),
    torch.allclose(outputs.logits, plain.logits),
)

# %%
# What is refused
# ---------------
#
# To torch, an object of an unregistered class is one leaf. Its tensors would be neither split nor moved, so the call is
# refused:


class ModelOutput:
    def __init__(self, logits, hidden_states):
        self.logits, self.hidden_states = logits, hidden_states


def show(call):
    try:
        call()
    except (TypeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}")


show(lambda: pipeline(ModelOutput(torch.zeros(ROWS, 3), torch.zeros(ROWS, 8))))

# %%
# Above, inputs and labels have ten rows. Without labels, the three class weights could also be three rows, so the
# call is refused:

show(lambda: pipeline(text))

# %%
# It runs with the line from the message. ``Replicate`` passes the weights whole to every microbatch.

whole = RoundPipeRunConfig(split_input={"args[0].weights": Replicate})
print(torch.allclose(pipeline(text, roundpipe_run_config=whole).logits, plain.logits))

# %%
# Values other than tensors must be the same in all microbatches. If a layer puts the number of rows of its microbatch into
# the static part, joining the outputs raises an error:


class CountRows(nn.Module):
    def forward(self, state):
        return State(state.hidden, state.extra, depth=len(state.hidden))


counting = RoundPipe(
    nn.Sequential(Read(), CountRows()), devices="virtual:2", model_run_config=whole
)
show(lambda: counting(text))

# %%
# After each of these errors, the next call of the pipeline works.

pipeline.close()
counting.close()
