"""
Flatten a class of your own
===========================

To torch, an object of an unregistered class is one leaf, however many tensors it contains. This page registers two
nested classes, draws the tree before and after, and then flattens and rebuilds an object.
"""

# %%
# Two classes
# -----------
#
# A beam search keeps the tokens and scores of its beams, and a memory of past tokens. Tensors are *children*. The
# length penalty and the window are constants of an exported program: the *static* part (*context* in torch, *aux* in
# JAX).

# sphinx_gallery_thumbnail_number = 2
import dataclasses

import matplotlib.pyplot as plt
import torch
import torch.utils._pytree as pytree

from yobx_flatten import (
    dynamic_shapes,
    make_flattening_function_for_dataclass,
    register_class_flattening,
    string_type,
    unregister_class_flattening,
)

STATIC = {"static": True}


@dataclasses.dataclass
class Memory:
    keys: torch.Tensor
    values: torch.Tensor
    window: int = dataclasses.field(default=8, metadata=STATIC)


@dataclasses.dataclass
class Beams:
    tokens: torch.Tensor
    scores: torch.Tensor
    memory: Memory
    penalty: float = dataclasses.field(default=0.6, metadata=STATIC)


def example(rows=2, length=5):
    memory = Memory(torch.zeros(rows, length, 4), torch.ones(rows, length, 4))
    return Beams(
        torch.arange(rows * length).reshape(rows, length), torch.zeros(rows), memory
    )


print(string_type(example(), with_shape=True))

# %%
# Draw a tree
# -----------
#
# Ask torch for the children of an object, one level at a time. If torch returns the object itself, the object is a
# leaf. Leaves that are not tensors are red: ``torch.export`` refuses them.

NODE, LEAF, OPAQUE, STATIC_PART = "#4c72b0", "#3a923a", "#c03d3e", "#7f7f7f"


def children_of(obj):
    """The keys and children of one object, or None for a leaf."""
    pairs, _ = pytree.tree_flatten_with_path(obj, is_leaf=lambda part: part is not obj)
    return (
        None
        if len(pairs) == 1 and pairs[0][1] is obj
        else [(pytree.keystr(path), part) for path, part in pairs]
    )


def place(obj, label, depth, row, boxes, lines):
    """Put one object and what is below it on the page; return its height and the next free row."""
    children = children_of(obj)
    if children is None:
        tensor = isinstance(obj, torch.Tensor)
        text = (
            "×".join(map(str, obj.shape)) if tensor else f"{type(obj).__name__}, a leaf"
        )
        boxes.append(
            (depth, row, f"{label}\n{text}".strip(), LEAF if tensor else OPAQUE, "-")
        )
        return row, row + 1
    first, heights = row, []
    for key, child in children:
        height, row = place(child, key, depth + 1, row, boxes, lines)
        heights.append(height)
    static = pytree.tree_structure(obj).context
    boxes.append((depth + 1, row, f"static\n{static[1]}", STATIC_PART, "--"))
    heights.append(row)
    row += 1
    middle = (first + row - 1) / 2
    boxes.append((depth, middle, f"{label}\n{type(obj).__name__}".strip(), NODE, "-"))
    lines += [(depth, middle, depth + 1, height) for height in heights]
    return middle, row


def draw(obj, ax, title):
    boxes, lines = [], []
    _, rows = place(obj, "", 0, 0, boxes, lines)
    for x0, y0, x1, y1 in lines:
        ax.plot(
            [x0, x0 + 0.5, x0 + 0.5, x1],
            [y0, y0, y1, y1],
            color="#b0b0b0",
            lw=1.2,
            zorder=1,
        )
    for x, y, text, color, style in boxes:
        box = {
            "boxstyle": "round,pad=0.45",
            "fc": "white",
            "ec": color,
            "lw": 1.8,
            "ls": style,
        }
        ax.text(
            x,
            y,
            text,
            ha="center",
            va="center",
            fontsize=9,
            color=color,
            bbox=box,
            zorder=2,
        )
    ax.set_xlim(-0.45, max(2, max(x for x, *_ in boxes)) + 0.45)
    ax.set_ylim(max(rows, 2) - 0.4, -0.6)
    ax.set_title(title, loc="left", fontsize=11)
    ax.set_xticks(range(int(ax.get_xlim()[1]) + 1))
    ax.set_xlabel("depth in the tree")
    ax.set_yticks([])
    for side in ("left", "right", "top"):
        ax.spines[side].set_visible(False)


# %%
# Before: one leaf
# ----------------

fig, ax = plt.subplots(figsize=(8, 1.9), layout="constrained")
draw(example(), ax, "before: one leaf that torch.export refuses")

# %%
# Register, with a check
# ----------------------
#
# The fields define how the class is flattened. ``f_check`` makes an example object, which is flattened and rebuilt at
# once; if the rebuilt object differs, the registration is undone. Register the inner class first, because the check of
# the outer class needs it.

checks = {Memory: lambda: example().memory, Beams: example}
for cls, f_check in checks.items():
    f_flatten, f_flatten_with_keys, f_unflatten = (
        make_flattening_function_for_dataclass(cls, set())
    )
    print(
        cls.__name__,
        register_class_flattening(
            cls, f_flatten, f_unflatten, f_flatten_with_keys, f_check
        ),
    )

# %%
# After: four tensors
# -------------------
#
# Nodes are blue, leaves are green and in the order in which torch lists them, and static parts are grey.

fig, ax = plt.subplots(figsize=(8, 5.2), layout="constrained")
draw(example(), ax, "after: two nodes, four leaves")

# %%
# Flatten and rebuild
# -------------------
#
# The rebuilt object holds the very same tensors.

beams = example()
leaves, spec = pytree.tree_flatten(beams)
rebuilt = pytree.tree_unflatten(leaves, spec)
print(spec)
print(
    all(a is b for a, b in zip(leaves, pytree.tree_leaves(rebuilt), strict=True)),
    rebuilt.penalty,
)

# %%
# Export a model that uses the class
# ----------------------------------
#
# The exported program accepts and returns the class, with any number of rows and any length.


class Penalise(torch.nn.Module):
    def forward(self, beams):
        scores = beams.scores - beams.penalty * beams.tokens.shape[1]
        return dataclasses.replace(beams, scores=scores)


program = torch.export.export(
    Penalise(), (beams,), dynamic_shapes=dynamic_shapes((beams,))
)
print(
    string_type(
        program.module()(example(rows=3, length=10)), with_shape=True, with_min_max=True
    )
)

# %%
# Unregister
# ----------

for cls in checks:
    unregister_class_flattening(cls)
print(children_of(example()))
