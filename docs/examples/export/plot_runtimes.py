"""
One program in several runtimes
===============================

One program of ``torch.export`` is converted to files for several runtimes. Here a small Llama with random weights is
exported once and written for onnxruntime and for OpenVINO. Both files are called with the same tokens. Each file
appears only after it was compared with the model.
"""

# %%
# Export once
# -----------
#
# ``bounds`` sets the largest sizes: files for OpenVINO refuse larger sizes, and ExecuTorch allocates memory for the
# largest sizes.

import importlib.util
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from yobx_flatten import DecodeSizes, decode_inputs, export_program
from yobx_flatten.runners.open import open_runner

config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.3,
)
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()
inputs = decode_inputs(model, DecodeSizes(batch=2, past=5, new=3))
exported = export_program(
    model, (), inputs, bounds={"batch": 4, "length": 64}, proof="sample"
)
print(exported.report)

# %%
# Write a file for each runtime
# -----------------------------
#
# OpenVINO is an extra of the package. ``to_aotinductor`` works in the same way and needs a compiler, and
# ``to_executorch`` needs ExecuTorch.

folder = Path(tempfile.mkdtemp())
reports = {
    "onnxruntime": (folder / "llama.onnx", exported.to_onnx(folder / "llama.onnx"))
}
if importlib.util.find_spec("openvino"):
    reports["OpenVINO"] = (
        folder / "llama.xml",
        exported.to_openvino(folder / "llama.xml"),
    )
for name, (path, report) in reports.items():
    print(f"{name}: {path.name}, largest difference {report.max_difference:.0e}")

# %%
# Call them in the same way
# -------------------------
#
# A runner accepts inputs by name and returns outputs by name. ``step`` keeps the cache in the memory of the runtime.
# Here each runner reads a prompt and generates 40 tokens; the logits of each step are compared with the model's.

prompt, steps = torch.tensor([[7, 21, 3]]), 40
tokens = model.generate(
    prompt, max_new_tokens=steps, do_sample=False, eos_token_id=None
)
with torch.no_grad():
    expected = model(tokens).logits


def differences(path):
    """Feed the tokens of the model one by one; return how far the scores are from the model's, and the choices."""
    runner = open_runner(path)
    ports = [
        port
        for name, port in runner.ports.items()
        if name.startswith("past_key_values")
    ]
    cache = runner.cache({port.name: torch.zeros(1, 2, 0, 16) for port in ports})
    found, chosen = [], []
    for place in range(tokens.shape[1] - 1):
        feeds = {
            "input_ids": tokens[:, place : place + 1],
            "attention_mask": torch.ones(1, place + 1).long(),
        }
        feeds["position_ids"] = torch.tensor([[place]])
        outputs, cache = runner.step(
            {name: feeds[name] for name in runner.ports if name in feeds}, cache
        )
        scores = outputs["logits"][0, -1]
        found.append(float((scores - expected[0, place]).abs().max()))
        chosen.append(int(scores.argmax()))
    return found, chosen


found = {}
for name, (path, _) in reports.items():
    found[name], chosen = differences(path)
    print(
        f"{name}: the tokens of model.generate: {chosen[2:] == tokens[0, 3:].tolist()}"
    )

# %%
# The picture shows the difference between the logits of each runtime and those of the model:

figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
for name, off in found.items():
    axes.semilogy(range(1, len(off) + 1), off, ".-", label=name)
axes.set_xlabel("tokens seen")
axes.set_ylabel("difference of a score")
axes.set_title("Float32 rounds in another order, and no more")
axes.legend(frameon=False)
plt.show()

# %%
# More tokens than the bounds allow
# ---------------------------------
#
# The file was exported for up to 64 tokens. The file refuses more tokens before anything is computed.

if "OpenVINO" in reports:
    runner = open_runner(reports["OpenVINO"][0])
    cache = {
        name: torch.zeros(1, 2, 70, 16)
        for name in runner.ports
        if name.startswith("past_key_values")
    }
    try:
        runner.run(
            {"input_ids": prompt, "attention_mask": torch.ones(1, 73).long(), **cache}
        )
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
