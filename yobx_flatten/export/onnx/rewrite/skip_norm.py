"""Merge a residual sum and its normalisation into one operator of onnxruntime.

.. code-block:: text

    hidden ──┬── Add ──┬── RMSNormalization        hidden ──┬── SkipSimplifiedLayerNormalization ──┬── normalised
    layer ───┘         └── the sum                 layer ───┘                                      └── the sum
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .matching import producer, replace_value
from .repair import attribute, input_of

if TYPE_CHECKING:
    import onnx_ir as ir


def fuse_skip_norms(model: ir.Model) -> None:
    """Replace each sum of two values of one shape that an ``RMSNormalization`` reads, and the latter, in place."""
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
        # mean and variance, which are for training; an empty name leaves an output out
        for unused in fused.outputs[1:3]:
            unused.name = ""
        graph.insert_before(add, fused)
        for old, new in ((norm.outputs[0], fused.outputs[0]), (add.outputs[0], fused.outputs[3])):
            replace_value(old, new)
        graph.remove([norm, add], safe=True)
        model.opset_imports["com.microsoft"] = 1


def _fits(add: ir.Node, norm: ir.Node) -> bool:
    """Whether the sum is over values of one shape (batch, tokens, hidden), and each token is normalised by itself."""
    left, right, total, weights = input_of(add, 0), input_of(add, 1), add.outputs[0], input_of(norm, 1)
    # the kernel on the CPU is for float32 (1) and float16 (10), of one type for all
    if left.dtype is None or not left.dtype == right.dtype == weights.dtype or left.dtype not in (1, 10):
        return False
    if left.shape is None or right.shape is None or total.shape is None or weights.shape is None:
        return False
    # the operator of onnxruntime knows no other axis
    last = attribute(norm, "axis", -1) in (-1, len(total.shape) - 1)
    if not last or len(total.shape) != 3 or len(weights.shape) != 1 or weights.shape[0] != total.shape[-1]:
        return False
    # it does not broadcast: a bias that is added is not a residual
    return list(left.shape) == list(right.shape) == list(total.shape)
