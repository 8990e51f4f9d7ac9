"""Let an embedding read the quantised table of the head that is tied to it, so that the file has it once.

.. code-block:: text

    table in float ──> Gather ──> hidden             bits, scales, zero points ──┬──> GatherBlockQuantized ──> hidden
    bits, ... ──> MatMulNBits ──> scores                                         └──> MatMulNBits ──> scores
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ..errors import FlattenError
from ..runners.onnx_session import open_session
from .onnx_graph import attribute
from .quantization import Quantization

__all__ = ["gathers_blocks", "share_table"]


def share_table(graph: Any, value: Any, parts: Sequence[Any], quantization: Quantization) -> bool:
    """Replace what gathers rows of a matrix by the operator that gathers them from its quantised parts.

    Args:
        graph: the graph of both.
        value: the matrix in float, whose rows are those of the parts.
        parts: bits, scales and zero points of its product.
        quantization: how they were made.

    Returns:
        Whether nothing reads the matrix in float any more.
    """
    import onnx_ir as ir

    readers = [use.node for use in value.uses()]
    rows, width = value.const_value.shape
    plain = all(
        node.op_type == "Gather" and node.inputs[0] is value and attribute(node, "axis", 0) == 0 for node in readers
    )
    if not readers or not plain or value.is_graph_output() or width % quantization.block_size:
        return False
    if not gathers_blocks(quantization.bits, quantization.block_size):
        return False
    sizes = {"bits": quantization.bits, "block_size": quantization.block_size, "gather_axis": 0, "quantize_axis": 1}
    for node in readers:
        shape = ir.node("Constant", [], {"value_ints": [int(rows), -1]})
        flat = [ir.node("Reshape", [part, shape.outputs[0]]) for part in parts]
        bits, scales, points = (one.outputs[0] for one in flat)
        gather = ir.node(
            "GatherBlockQuantized",
            [bits, node.inputs[1], scales, points],
            sizes,
            domain="com.microsoft",
            name=node.name,
        )
        made = [shape, *flat, gather]
        ir.convenience.replace_nodes_and_values(graph, node, [node], made, [node.outputs[0]], [gather.outputs[0]])
    return True


@functools.cache
def gathers_blocks(bits: int, block_size: int) -> bool:
    """Return whether onnxruntime gathers rows of such blocks right, found with a small table."""
    import numpy
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    table = numpy.linspace(-1, 1, 6 * 2 * block_size, dtype=numpy.float32).reshape(6, -1)
    made = Quantization("int4" if bits == 4 else "int8", block_size=block_size).quantize(
        numpy.ascontiguousarray(table.T)
    )
    names = ["bits", "scales", "points"]
    node = helper.make_node(
        "GatherBlockQuantized",
        ["bits", "rows", "scales", "points"],
        ["y"],
        domain="com.microsoft",
        bits=bits,
        block_size=block_size,
        gather_axis=0,
        quantize_axis=1,
    )
    graph = helper.make_graph(
        [node],
        "probe",
        [helper.make_tensor_value_info("rows", TensorProto.INT64, [3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 2 * block_size])],
        [numpy_helper.from_array(part.reshape(6, -1), name) for part, name in zip(made, names, strict=True)],
    )
    versions = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    probe: onnx.ModelProto = helper.make_model(graph, opset_imports=versions, ir_version=10)
    rows = numpy.array([5, 0, 3])
    try:
        found = open_session(probe.SerializeToString(), caller="quantize").run(None, {"rows": rows})[0]
    except FlattenError:
        return False
    except Exception:  # onnxruntime has no base class for its errors
        return False
    return float(numpy.abs(found - table[rows]).max()) < 0.1
