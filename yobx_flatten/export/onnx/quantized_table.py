"""Let the embedding read the quantised table of the tied head, so that the file stores it once.

.. code-block:: text

    table in float ──> Gather ──> hidden             bits, scales, zero points ──┬──> GatherBlockQuantized ──> hidden
    bits, ... ──> MatMulNBits ──> scores                                         └──> MatMulNBits ──> scores
"""

from __future__ import annotations

import functools
import math
from typing import Any

from ...errors.failures import result_or
from ...runners.onnx_session import open_session
from ..quantization.options import Quantization
from .rewrite.repair import attribute
from .stored_matrix import StoredMatrix, take_rows


def share_table(value: Any, stored: StoredMatrix) -> bool:
    """Replace what gathers rows of a matrix by the operator that gathers them from its quantised parts."""
    readers = [use.node for use in value.uses()]
    if not readers or not _is_gathered(value) or value.const_value.shape[1] % stored.block_size:
        return False
    if not gathers_blocks(stored.bits, stored.block_size):
        return False
    for node in readers:
        take_rows(node, stored)
    return True


def gathered(graph: Any) -> list[Any]:
    """Return the matrices of a graph of which only rows are gathered."""
    found = []
    for value in graph.initializers.values():
        tensor = value.const_value
        is_matrix = tensor is not None and len(tensor.shape) == 2 and tensor.dtype.name in ("FLOAT", "FLOAT16")
        if is_matrix and value.uses() and _is_gathered(value):
            found.append(value)
    return found


def _is_gathered(value: Any) -> bool:
    plain = all(
        use.node.op_type == "Gather" and use.node.inputs[0] is value and attribute(use.node, "axis", 0) == 0
        for use in value.uses()
    )
    return plain and not value.is_graph_output()


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

    def difference() -> float:
        found = open_session(probe.SerializeToString(), caller="quantize").run(None, {"rows": rows})[0]
        return float(numpy.abs(found - table[rows]).max())

    return result_or(difference, lambda error: math.inf) < 0.1  # onnxruntime has no base class for its errors
