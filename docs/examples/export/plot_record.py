"""
Record a generate, export it, replay it
=======================================

An export needs example inputs, and the sizes of these inputs that vary. A recording of a running model provides both.
Here a small Mistral with random weights and a sliding window generates once. Its recorded calls are exported to two
programs: one for the prompt, and one for the tokens after it. Then the model generates again, with different sizes and
far beyond its window, and the programs are compared with this second recording.
"""

# %%
# Run the model as usual
# ----------------------
#
# Inside the block every call of ``forward`` is recorded: its arguments before it runs, its outputs afterwards.

import matplotlib.pyplot as plt
import numpy as np
import torch
from transformers import MistralConfig, MistralForCausalLM

from yobx_flatten import export_program, record_calls

WINDOW = 12
config = MistralConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=WINDOW,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
torch.manual_seed(0)
model = MistralForCausalLM(config).eval()


def generate(batch, length, tokens):
    prompt = torch.randint(3, config.vocab_size, (batch, length))
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0  # a padded row
    model.generate(
        input_ids=prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False
    )


with record_calls(model) as calls:
    generate(batch=2, length=6, tokens=9)

# %%
# Sizes that vary
# ---------------
#
# The cache contains the number of tokens that it has seen. Each other size has the name of the quantity that it equals.

print(calls)

# %%
# Sizes over the calls
# --------------------
#
# One line per name. The sizes ``past`` and ``total`` grow from call to call; the sliding layers keep ``WINDOW - 1``
# keys.

axes = calls.axes()
styles = {
    "total": {"color": "#8172b3", "marker": "o"},
    "past": {"color": "#4c72b0", "marker": "s"},
    "kept": {"color": "#dd8452", "marker": "^"},
    "new": {"color": "#3a923a", "marker": "v"},
    "batch": {"color": "#7f7f7f", "marker": "."},
}
fig, ax = plt.subplots(figsize=(8, 4.2), layout="constrained")
for name, style in styles.items():
    sizes = axes.sizes[name]
    ax.plot(list(sizes), list(sizes.values()), label=name, lw=1.5, ms=5, **style)
ax.axvspan(-0.3, 0.5, color="#7f7f7f", alpha=0.12, lw=0)
ax.text(0.1, ax.get_ylim()[1] * 0.96, "prefill", ha="center", va="top", color="#555555")
ax.text(0.6, ax.get_ylim()[1] * 0.96, "decode", ha="left", va="top", color="#555555")
ax.set_xlabel("call")
ax.set_ylabel("size")
ax.set_title(
    "Sizes of the arguments, by the name they were found to have",
    loc="left",
    fontsize=11,
)
ax.set_xlim(-0.3, len(calls) - 0.7)
ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
ax.grid(alpha=0.25)
ax.spines[["right", "top"]].set_visible(False)

# %%
# Two programs
# ------------
#
# ``module`` is the model with its constant arguments, ``example`` is a recorded call, and ``dynamic_shapes`` lists its
# sizes that vary. Nothing is written by hand.

programs = {}
for phase, part in calls.phases().items():
    programs[phase] = export_program(
        part.module(),
        kwargs=part.example(),
        dynamic_shapes=part.dynamic_shapes(),
        cases=[],
    )
    print(phase, programs[phase].report.input_names)
    print(part.replay(programs[phase]))

# %%
# Different sizes, beyond the window
# ----------------------------------
#
# A second recording has five rows and 40 tokens. The export did not use this second recording.

with record_calls(model) as longer:
    generate(batch=5, length=9, tokens=40)

replays = {
    phase: part.replay(programs[phase]) for phase, part in longer.phases().items()
}
past = [call.past for call in longer]
differences = [
    call.max_difference for replay in replays.values() for call in replay.calls
]
print({phase: (len(replay.calls), replay.ok) for phase, replay in replays.items()})
print(f"largest difference of {len(differences)} calls: {max(differences):.0e}")

# %%
# The differences are the rounding of float32, below the window and beyond it.

fig, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
ax.semilogy(past, np.maximum(differences, 1e-9), "o-", ms=3.5, lw=1, color="#8172b3")
ax.axhline(np.finfo(np.float32).eps, color="#7f7f7f", ls=":", lw=1.2)
ax.annotate(
    "float32 epsilon",
    (past[-1], np.finfo(np.float32).eps),
    (-4, 5),
    textcoords="offset points",
    ha="right",
)
ax.axvspan(WINDOW - 1, past[-1], color="#7f7f7f", alpha=0.08, lw=0)
ax.annotate(
    "past the window",
    (WINDOW - 1, 2e-5),
    (6, 0),
    textcoords="offset points",
    va="center",
    color="#555555",
)
ax.set_ylim(5e-10, 1e-4)
ax.set_xlim(0, past[-1])
ax.set_xlabel("tokens seen before the call")
ax.set_ylabel("largest difference")
ax.set_title(
    "Programs against what was recorded, all outputs and the cache",
    loc="left",
    fontsize=11,
)
ax.grid(alpha=0.25)
ax.spines[["right", "top"]].set_visible(False)
