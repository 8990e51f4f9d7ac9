"""
A failing export, diagnosed
===========================

The inputs of a decoder are a cache, an object of an unregistered class, and a mask. torch refuses one input per attempt, and
names its class but not its place. This page draws the inputs as torch flattens them, registers the marked classes, and
explains the next error of torch.
"""

# %%
# The inputs
# ----------
#
# A model with random weights, in a module whose inputs are tokens, a cache, and an object with more state.

import dataclasses

import matplotlib.pyplot as plt
import torch
import transformers

from yobx_flatten import (
    check_inputs,
    dynamic_shapes,
    explain,
    explain_error,
    register,
    register_flattening_functions,
    unregister_class_flattening,
)

transformers.logging.set_verbosity_error()
config = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(config).eval()


@dataclasses.dataclass
class Guidance:
    """What steers the next token."""

    bias: torch.Tensor
    scale: float = dataclasses.field(default=2.0, metadata={"static": True})


class Decoder(torch.nn.Module):
    """One step: tokens and cache in, steered logits and cache out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, cache, steering):
        outputs = self.model(input_ids=input_ids, cache=cache)
        guidance = steering["guidance"]
        return outputs.logits + guidance.scale * guidance.bias, outputs.cache


with torch.no_grad():
    cache = model(input_ids=torch.zeros(2, 5, dtype=torch.int64)).cache
kwargs = {
    "input_ids": torch.ones(2, 3, dtype=torch.int64),
    "cache": cache,
    "steering": {
        "guidance": Guidance(torch.zeros(64)),
        "history": [torch.zeros(64), torch.ones(64)],
    },
}

# %%
# What torch reports
# ------------------
#
# torch names the class and three possible fixes. ``explain_error`` adds the place, and the fix that applies.

decoder = Decoder(model)
try:
    torch.export.export(decoder, (), kwargs)
except ValueError as error:
    print("torch:  ", str(error)[:76], "...")
    print("in other words:", explain_error(error, decoder, (), kwargs))

# %%
# What torch sees
# ---------------
#
# ``check_inputs`` lists all errors in the inputs at once, and ``explain`` draws the inputs.

print(check_inputs(decoder, (), kwargs))
before = explain(kwargs, name="kwargs")
print(before)

# %%
# Run the lines that it prints, and everything is flattened.

register(Guidance)
with register_flattening_functions(patch_transformers=True):
    after = explain(kwargs, name="kwargs")
print(after)

# %%
# A picture
# ---------
#
# Each row of the drawing has a kind (leaf, node, static part), so the picture can use colors: before and after.

COLORS = {
    "node": "#4c72b0",
    "tensor": "#3a923a",
    "value": "#8c8c8c",
    "opaque": "#c44e52",
}
MEANS = {
    "node": "is flattened",
    "tensor": "tensor",
    "value": "other leaf",
    "opaque": "a leaf that holds tensors",
}


def draw(ax, drawing, title):
    for number, row in enumerate(drawing.rows):
        color = COLORS[row.kind]
        parent = next(
            (
                n
                for n in range(number - 1, -1, -1)
                if drawing.rows[n].depth == row.depth - 1
            ),
            None,
        )
        if parent is not None:
            ax.plot(
                [row.depth - 1, row.depth - 1, row.depth],
                [parent, number, number],
                color="#c8c8c8",
                lw=1,
                zorder=0,
            )
        ax.plot(
            row.depth, number, "o" if row.kind == "node" else "s", color=color, ms=7
        )
        text = row.text.removeprefix("✗ ").replace(", not registered:", ":")
        ax.text(
            row.depth + 0.2,
            number,
            f"{row.label}   {text}",
            va="center",
            size=8.5,
            color=color,
        )
    ax.set_title(title, loc="left", fontsize=11)
    ax.set_xlim(-0.3, 7.5)
    ax.set_ylim(10.6, -0.8)
    ax.axis("off")


fig, (left, right) = plt.subplots(1, 2, figsize=(10.4, 4), layout="constrained")
draw(left, before, "Outside the block: two leaves hold tensors")
draw(right, after, "Inside, with Guidance registered")
handles = [
    plt.Line2D([], [], marker="s", ls="", color=color, label=MEANS[kind])
    for kind, color in COLORS.items()
]
fig.legend(
    handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9
)

# %%
# The export
# ----------
#
# Now the export passes. A call with a different structure is refused. torch prints both structures in full;
# ``explain_error`` prints the one line in which they differ.

with register_flattening_functions(patch_transformers=True):
    print(check_inputs(decoder, (), kwargs, dynamic_shapes(kwargs)))
    program = torch.export.export(
        decoder, (), kwargs, dynamic_shapes=dynamic_shapes(kwargs)
    )
    wrong = {
        **kwargs,
        "steering": {
            "guidance": Guidance(torch.zeros(64), scale=3.0),
            "history": [torch.zeros(64)],
        },
    }
    try:
        program.module()(**wrong)
    except ValueError as error:
        print(f"torch:   {len(str(error))} characters")
        print("in other words:", explain_error(error, program, (), wrong))

unregister_class_flattening(Guidance)
