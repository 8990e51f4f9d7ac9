"""The file's weights are in eight bits, and onnxruntime alone mostly chooses the tokens that the model chooses."""

import numpy as np
import onnx
import onnxruntime
import torch

import __main__ as page

nodes = [node for node in onnx.load("mistral.onnx").graph.node if node.op_type == "MatMulNBits"]
bits = {attribute.i for node in nodes for attribute in node.attribute if attribute.name == "bits"}
assert len(nodes) >= 7 * page.config.num_hidden_layers
assert bits == {8}

tokens, layers = page.tokens, page.config.num_hidden_layers
rows, length = tokens.shape
empty = np.zeros((rows, page.config.num_key_value_heads, 0, page.config.head_dim), np.float32)
session = onnxruntime.InferenceSession("mistral.onnx", providers=["CPUExecutionProvider"])
feeds = {f"past_key_values.{n}.{part}": empty for n in range(layers) for part in ("key", "value")}
feeds["input_ids"], feeds["attention_mask"] = tokens.numpy(), np.ones((rows, length), np.int64)
feeds["position_ids"] = np.arange(length)[None].repeat(rows, 0)
found = session.run(["logits"], feeds)[0].argmax(-1)
with torch.no_grad():
    wanted = page.model(tokens).logits.argmax(-1).numpy()
assert (found == wanted).mean() > 0.9
