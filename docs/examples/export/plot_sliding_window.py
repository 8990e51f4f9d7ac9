"""
One graph, below and past the window
====================================

A layer with a sliding window keeps the last ``window - 1`` keys. The model's code branches on whether the window is full,
and a trace follows one branch only, so a program traced by torch alone is wrong in the other case. Here a small Gemma 3
with random weights is exported to ONNX once. In onnxruntime it generates from 3 tokens to 51, three times its window.
"""

# %%
# A model with two kinds of layers
# --------------------------------
#
# Two layers have a sliding window; the last layer attends to all tokens.

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from yobx_flatten import DecodeSizes, decode_inputs, export_onnx, string_type

WINDOW, STEPS = 16, 48
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
config = Gemma3TextConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=len(KINDS),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    query_pre_attn_scalar=16,
    sliding_window=WINDOW,
    layer_types=KINDS,
    max_position_embeddings=256,
)
torch.manual_seed(0)
model = Gemma3ForCausalLM(config).eval()

# %%
# Export once
# -----------
#
# The example has two rows, five past tokens and three new ones, because sizes of 0 and 1 would be fixed in the program.
# ``cases=[]`` skips the cases that ``export_onnx`` chooses, because the loop below checks more.

inputs = decode_inputs(model, DecodeSizes(batch=2, past=5, new=3))
print(string_type(inputs, with_shape=True))

path = Path(tempfile.mkdtemp()) / "gemma3.onnx"
exported = export_onnx(model, kwargs=inputs, path=path, cases=[], steps=1)
print(exported.report.input_names)
print(f"largest difference for the example: {exported.report.max_difference:.0e}")

# %%
# Generate in onnxruntime
# -----------------------
#
# The loop has one row and one token per call. The outputs ``present.*`` are the next inputs ``past_key_values.*``.
# The eager model gets the same tokens and its own cache.


def keys_per_layer(feeds):
    return [
        feeds[f"past_key_values.{layer}.key"].shape[2] for layer in range(len(KINDS))
    ]


session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
names = [output.name for output in session.get_outputs()]
start = decode_inputs(model, DecodeSizes(batch=1, past=3, new=1), like=inputs)
cache = start["cache"]
feeds = {
    "input_ids": start["input_ids"].numpy(),
    "attention_mask": start["attention_mask"].numpy(),
}
for index, layer in enumerate(cache.layers):
    feeds[f"past_key_values.{index}.key"] = layer.keys.numpy()
    feeds[f"past_key_values.{index}.value"] = layer.values.numpy()

tokens_seen, kept, differences = [], [], []
with torch.no_grad():
    for _ in range(STEPS):
        outputs = dict(zip(names, session.run(None, feeds), strict=True))
        eager = model(
            input_ids=torch.from_numpy(feeds["input_ids"]),
            attention_mask=torch.from_numpy(feeds["attention_mask"]),
            cache=cache,
        )
        feeds = {
            "input_ids": outputs["logits"][:, -1:].argmax(-1),
            "attention_mask": np.pad(
                feeds["attention_mask"], ((0, 0), (0, 1)), constant_values=1
            ),
            **{
                name.replace("present", "past_key_values"): value
                for name, value in outputs.items()
                if name.startswith("present")
            },
        }
        tokens_seen.append(cache.get_seq_length(KINDS.index("full_attention")))
        kept.append(keys_per_layer(feeds))
        differences.append(np.abs(outputs["logits"] - eager.logits.numpy()).max())

print("tokens seen:", tokens_seen[0], "to", tokens_seen[-1])
print("keys kept at the end, layer by layer:", kept[-1])
print("most keys kept by a sliding layer:", max(max(row[:2]) for row in kept))
print(f"largest difference of all steps: {max(differences):.0e}")

# %%
# Keys in the cache, and differences
# ----------------------------------
#
# The two sliding layers keep ``window - 1`` = 15 keys, in the graph and in the eager model. The full layer keeps all keys.
# The differences are the rounding of float32, below and beyond the window.

fig, (above, below) = plt.subplots(
    2, 1, figsize=(8, 6.4), sharex=True, layout="constrained"
)
placement = {"textcoords": "offset points", "ha": "right"}
styles = [
    {"color": "#4c72b0", "lw": 5, "alpha": 0.45},
    {"color": "#dd8452", "lw": 1.8},
    {"color": "#3a923a", "lw": 1.8},
]
for layer, (kind, style) in enumerate(zip(KINDS, styles, strict=True)):
    above.plot(
        tokens_seen,
        [row[layer] for row in kept],
        label=f"layer {layer}, {kind.replace('_', ' ')}",
        **style,
    )
above.axhline(WINDOW - 1, color="#7f7f7f", ls=":", lw=1.2)
above.annotate(
    f"window - 1 = {WINDOW - 1}", (tokens_seen[-1], WINDOW - 1), (-4, 6), **placement
)
above.set_ylabel("keys kept")
above.set_ylim(0)
above.legend(frameon=False, loc="upper left")
above.set_title(
    "Keys in the cache that the ONNX graph returns", loc="left", fontsize=11
)

below.semilogy(
    tokens_seen, np.maximum(differences, 1e-9), "o-", ms=3.5, lw=1, color="#8172b3"
)
below.axhline(np.finfo(np.float32).eps, color="#7f7f7f", ls=":", lw=1.2)
below.annotate(
    "float32 epsilon",
    (tokens_seen[-1], np.finfo(np.float32).eps),
    (-4, -12),
    **placement,
)
below.set_ylim(1e-8, 1e-4)
below.set_ylabel("largest difference of the logits")
below.set_xlabel("tokens seen")
below.set_title("onnxruntime against the eager model", loc="left", fontsize=11)
for ax in (above, below):
    ax.axvspan(WINDOW - 1, tokens_seen[-1], color="#7f7f7f", alpha=0.08, lw=0)
    ax.grid(alpha=0.25)
    ax.spines[["right", "top"]].set_visible(False)
    ax.set_xlim(tokens_seen[0], tokens_seen[-1])
_ = below.annotate(
    "past the window",
    (WINDOW - 1, 5e-5),
    (6, 0),
    textcoords="offset points",
    va="center",
    color="#555555",
)
