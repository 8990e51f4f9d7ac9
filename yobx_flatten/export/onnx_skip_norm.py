"""A residual sum and the normalisation of it in one operator of onnxruntime.

.. code-block:: text

    hidden ──┬── Add ──┬── RMSNormalization        hidden ──┬── SkipSimplifiedLayerNormalization ──┬── normalised
    layer ───┘         └── the sum                 layer ───┘                                      └── the sum
"""

from __future__ import annotations

from typing import Any

from .onnx_attention import producer, replace_value
from .onnx_graph import attribute

__all__ = ["fuse_skip_norms"]


def fuse_skip_norms(model: Any) -> None:
    """Replace each sum of two values of one shape that an ``RMSNormalization`` reads, and the latter, in place.

    Args:
        model: an ``onnx_ir.Model`` of opset 23.
    """
    import onnx_ir as ir

    graph = model.graph
    for norm in [node for node in graph if node.op_type == "RMSNormalization" and node.domain == ""]:
        add = producer(norm.inputs[0], "Add")
        if add is None or not _fits(add, norm):
            continue
        epsilon = attribute(norm, "epsilon", 1e-5)
        inputs = [*add.inputs, norm.inputs[1]]
        fused = ir.node(
            "SkipSimplifiedLayerNormalization",
            inputs,
            {"epsilon": epsilon},
            domain="com.microsoft",
            num_outputs=4,
            name=norm.name,
        )
        for unused in fused.outputs[1:3]:
            unused.name = ""
        graph.insert_before(add, fused)
        for old, new in ((norm.outputs[0], fused.outputs[0]), (add.outputs[0], fused.outputs[3])):
            replace_value(old, new)
        graph.remove([norm, add], safe=True)
        model.opset_imports["com.microsoft"] = 1


def _fits(add: Any, norm: Any) -> bool:
    """Whether the sum is over values of one shape (batch, tokens, hidden), and each token is normalised by itself."""
    (left, right), total, weights = add.inputs, add.outputs[0], norm.inputs[1]
    if None in (left.shape, right.shape, total.shape, weights.shape) or not left.dtype == right.dtype == weights.dtype:
        return False
    if left.dtype not in (1, 10) or not list(left.shape) == list(right.shape) == list(total.shape):
        return False
    last = attribute(norm, "axis", -1) in (-1, len(total.shape) - 1)
    return last and len(total.shape) == 3 and len(weights.shape) == 1 and weights.shape[0] == total.shape[-1]
