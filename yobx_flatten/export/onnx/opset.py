"""Find the newest opset whose attention onnxruntime computes right, by running a small model once per process."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...errors.failures import result_or

# Opset 23 has Attention, RMSNormalization and RotaryEmbedding. Of 24, torch 2.13's exporter writes Attention only: what
# recognises the other two is bound to 23, and the file is slower.
ATTENTION_OPSET = 23
"""The opset of ``Attention``, ``RMSNormalization`` and ``RotaryEmbedding`` that torch's exporter writes."""

_TOLERANCE = 1e-5


@functools.cache
def attention_opset() -> int | None:
    """Return the opset to write by default: 23, or ``None``, the exporter's own choice, where 23 is not right.

    The probe is one normalisation and one attention with fewer heads of keys than of queries, keys of an earlier call,
    and a row that sees nothing, compared with PyTorch. It runs once per process, in some hundredths of a second.
    """
    # onnxruntime has no base class for its errors; whatever it is, 23 does not work
    return ATTENTION_OPSET if result_or(_difference, lambda error: float("inf")) <= _TOLERANCE else None


def _difference() -> float:
    """The largest difference between onnxruntime and PyTorch; infinite where one of them is not a number."""
    import onnxruntime

    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, 2, 2))
    query, weight = query[:, :, :2], torch.randn(8, generator=generator)
    mask = torch.ones(2, 1, 2, 5, dtype=torch.bool).tril(3)
    mask[0, :, 0] = False
    normalised = torch.nn.functional.rms_norm(query, (8,), weight, 1e-6)
    expected = torch.nn.functional.scaled_dot_product_attention(
        normalised, keys, values, attn_mask=mask, scale=0.5, enable_gqa=True
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(_model(), options, providers=["CPUExecutionProvider"])
    given = {
        "query": query, "weight": weight, "mask": mask, "key": keys[:, :, 3:], "value": values[:, :, 3:],
        "past_key": keys[:, :, :3], "past_value": values[:, :, :3],
    }  # fmt: skip
    found, present = session.run(None, {name: tensor.contiguous().numpy() for name, tensor in given.items()})
    differences = (expected - torch.from_numpy(found)).abs().max(), (keys - torch.from_numpy(present)).abs().max()
    return float(torch.stack(differences).nan_to_num(nan=float("inf")).max())


def _model() -> Any:
    import onnx
    from onnx import TensorProto, helper

    types = {"weight": 1, "mask": 4, "query": 4, "key": 4, "value": 4, "past_key": 4, "past_value": 4}
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.BOOL if name == "mask" else TensorProto.FLOAT, [None] * rank)
        for name, rank in types.items()
    ]
    taken = ["normalised", "key", "value", "mask", "past_key", "past_value"]
    nodes = [
        helper.make_node("RMSNormalization", ["query", "weight"], ["normalised"], epsilon=1e-6),
        helper.make_node("Attention", taken, ["output", "present_key", "present_value"], scale=0.5),
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 4) for name in ("output", "present_key")]
    graph = helper.make_graph(nodes, "probe", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", ATTENTION_OPSET)], ir_version=10)
    onnx.checker.check_model(model)
    return model.SerializeToString()
