"""
An encoder in 8 bits
====================

An encoder processes many tokens at once. In int8, the activations of each token have one scale, and so has each output
of a weight matrix. In trained models a few channels are much larger than the others and would determine the scale of
their token. Therefore each channel is divided by a number, which is computed from a sample text.
"""

# %%
# A model with large channels
# ---------------------------
#
# The model is a small BERT with random weights. Its norms make two channels eight times as large, which also happens in
# training.

import pathlib
import tempfile

import matplotlib.pyplot as plt
import onnxruntime
import torch
import transformers

from yobx_flatten import export_onnx
from yobx_flatten.export import Quantization

torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
)
model = transformers.BertModel(config, add_pooling_layer=False).eval()
for layer in model.encoder.layer:
    layer.output.LayerNorm.weight.data[[3, 40]] = 8.0


def tokens(rows, length):
    ids = torch.randint(0, 96, (rows, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# %%
# Three files
# -----------
#
# The first file has a scale for each block of 32 weights, the second a scale for each token. The third file also uses a
# text to divide the channels and to round the weights. ``export_folder("my-encoder", "out", quantize="int8")`` writes a
# file like the third, with a text that is part of the package.

folder = pathlib.Path(tempfile.mkdtemp())
text = tokens(32, 24)["input_ids"]
forms = {
    "blocks": Quantization("int8", activations="int8"),
    "token": Quantization("int8", activations="token"),
    "token, by a text": Quantization("int8", activations="token", calibration=text),
}
for name, quantization in forms.items():
    path = folder / f"{name}.onnx"
    exported = export_onnx(model, kwargs=tokens(2, 7), path=path, quantize=quantization)
    print(f"{name}: {exported.report.quality}")

# %%
# The error of an embedding
# -------------------------
#
# The embedding is the mean of the hidden states. The error is the angle between the embeddings of the file and of the
# model, for 40 texts that were not used for the export.

read = tokens(40, 16)
with torch.no_grad():
    wanted = model(**read).last_hidden_state.mean(1).double()
feeds = {name: value.numpy() for name, value in read.items()}
angles = {}
for name in forms:
    session = onnxruntime.InferenceSession(folder / f"{name}.onnx")
    hidden = torch.from_numpy(session.run(None, feeds)[0])
    cosine = torch.nn.functional.cosine_similarity(hidden.mean(1).double(), wanted)
    angles[name] = cosine.clamp(max=1).acos().rad2deg()
    print(f"{name}: at most {float(angles[name].max()):.3f} degrees")

plt.boxplot(list(angles.values()), tick_labels=list(angles))
plt.ylabel("angle to the model's embedding, degrees")
plt.ylim(bottom=0)
plt.show()
